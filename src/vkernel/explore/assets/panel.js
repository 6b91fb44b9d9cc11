// The panel of results: a headline, a bar of what is copied and what is new, sentences, and folded details.
import { at, make, paragraphs } from "./dom.js"

const percent = (v) => `${Math.round(100 * v)} %`

function bar({ name, copied, new: fresh, se }) {
  const text = `${name}: ${percent(copied)} copied, ${percent(fresh)} new${se ? `, ± ${Math.max(Math.round(100 * se), 1)} %` : ""}`
  const whole = make("span", { className: "whole", attributes: { role: "img", "aria-label": text } },
    make("span", { className: "copied", style: `width: ${100 * copied}%` }), make("span", { className: "fresh", style: `width: ${100 * fresh}%` }))
  return make("div", { className: "share" }, make("span", { className: "name", textContent: name }), whole,
    make("span", { className: "value", textContent: percent(fresh) }))
}

export function showResult(result) {
  at("panel-caption").textContent = result.caption ?? "Where samples end, ± standard error"
  at("headline").replaceChildren(...headline(result.headline))
  at("bars").replaceChildren(...(result.bars ?? []).map(bar))
  const [first, second, ...rest] = [result.sentences ?? []].flat()  // the second tells what single models do
  at("sentences").replaceChildren(...paragraphs([first, ...(result.arrays.member_gaps ? [second] : [])]))
  if (!result.arrays.member_gaps) rest.unshift(second)
  at("details").replaceChildren(...paragraphs([...rest, ...(result.details ?? []), result.note]))
}

// "92 % copied · 8 % new" in the colours of the laws.
function headline(text) {
  return String(text ?? "…").split(" · ").flatMap((part, k) => {
    const colour = part.includes("copied") ? "copied" : part.includes("new") ? "fresh" : ""
    return [...(k ? [make("span", { className: "between", textContent: " · " })] : []), make("span", { className: colour, textContent: part })]
  })
}

// The first sentence about time t, and the others folded.
export function showTime(panel) {
  const [first, ...rest] = [panel?.sentences ?? []].flat()
  at("at-t").replaceChildren(...paragraphs([first]))
  at("details-t").replaceChildren(...paragraphs(rest))
}

export function showGlossary(words) {
  at("words").replaceChildren(...(words ?? []).flatMap(({ symbol, name, text }) => [
    make("dt", {}, ...(symbol ? [make("i", { textContent: symbol }), " "] : []), name ?? ""), make("dd", { textContent: text })]))
  at("glossary").hidden = !words?.length
}

export function showClaims(claims) {
  at("verdicts").replaceChildren(...(claims ?? []).flatMap(({ claim, verdict, number }) => [
    make("dt", {}, `${verdict}: `, make("span", { textContent: claim })), make("dd", { textContent: number })]))
  at("claims").hidden = !claims?.length
}

export function showJob({ busy = false, label = "", share = 0, stale = false }) {
  at("app").classList.toggle("busy", busy)
  at("app").classList.toggle("stale", stale)
  at("job-bar").firstElementChild.style.width = `${Math.round(100 * share)}%`
  at("job-bar").setAttribute("aria-valuenow", Math.round(100 * share))
  at("job-label").textContent = label || (stale ? "samples are of an earlier state" : "samples are up to date")
  at("job-run").disabled = !stale
}
