// Short names for elements.
export const at = (id) => document.getElementById(id)
export const all = (query, root = document) => [...root.querySelectorAll(query)]

export function make(tag, given = {}, ...children) {
  const { dataset = {}, attributes = {}, ...rest } = given, made = Object.assign(document.createElement(tag), rest)
  Object.assign(made.dataset, dataset)
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value)
  made.append(...children)
  return made
}

export const paragraphs = (texts) => [texts ?? []].flat().filter(Boolean).map((text) => make("p", { textContent: text }))
