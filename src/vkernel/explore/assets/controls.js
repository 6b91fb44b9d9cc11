// The controls of the model, built from the content of the page: lists, sliders over a few values, pairs of buttons; the
// choice of the map, and layers.
import { at, make } from "./dom.js"

const applies = (item, sampler) => !item.samplers?.length || item.samplers.includes(sampler)
const LAWS = ["law", "members", "exact"]  // layers of the curves on the line; in the plane laws have tiles alone
const same = (a, b) => a === b || Number(a) === Number(b)

export class Controls {
  constructor(content, store) {
    Object.assign(this, { content, store, shown: [] })
    const groups = Object.entries(content.controls)
    at("controls").replaceChildren(...groups.map(([title, group], k) => this.group(title, group, k === 0)))
    this.makeMaps()
    this.makeLayers()
  }

  group(title, group, open) {
    const body = make("div", { className: "controls" }, ...group.map((control) => this.control(control)))
    if (open) return make("section", { className: "card" }, make("h2", { textContent: title }), body)
    return make("details", { className: "card fold" }, make("summary", { textContent: title }), body)
  }

  control(control) {
    const { name, caption, symbol, help, kind } = control, id = `control-${name}`, pair = kind === "pair"
    const text = make(pair ? "span" : "label", { className: "name", id: `name-${name}` }, caption)
    if (!pair) text.htmlFor = id
    if (symbol) text.append(" ", make("i", { textContent: symbol }))
    const made = { choice: this.choice, steps: this.steps, pair: this.pair }[kind].call(this, control, id)
    const about = make("span", { className: "hidden", id: `help-${name}`, textContent: help })
    const box = make("div", { className: `control ${kind === "steps" ? "half" : ""}`, dataset: { tip: help } }, text, ...made.parts, about)
    this.shown.push({ show: (state) => { box.hidden = !applies(control, state.sampler); made.show(state[name]) } })
    return box
  }

  set(name, value) {
    const patch = { [name]: value }
    if (name === "sampler") Object.assign(patch, this.suited(value))
    this.store.change(patch, name === "sampler" ? { shown: "law" } : {}, `control ${name}`)
  }

  // A map that the new sampler does not have gives way to the default one.
  suited(sampler) {
    const map = this.content.maps.find((m) => m.name === this.store.state.map)
    return map && applies(map, sampler) ? {} : { map: "noise" }
  }

  choice({ name, options }, id) {
    const list = make("select", { id }, ...options.map(([, caption], k) => make("option", { value: k, textContent: caption })))
    list.setAttribute("aria-describedby", `help-${name}`)
    list.onchange = () => this.set(name, options[list.value][0])
    return { parts: [list], show: (value) => { list.value = options.findIndex(([v]) => same(v, value)) } }
  }

  // A slider over the options. A value from an address that is none of them becomes a stop of its own, and stays one, so
  // that the slider shows it truly and never jumps.
  steps({ name, options }, id) {
    let stops = [...options]
    const slider = make("input", { id, type: "range", min: 0, step: 1 }), output = make("output", { id: `value-${name}` })
    slider.setAttribute("aria-describedby", `help-${name}`)
    output.htmlFor = id
    slider.oninput = () => this.set(name, stops[slider.value][0])
    const show = (value) => {
      let k = stops.findIndex(([v]) => same(v, value))
      if (k < 0) { stops = inserted(stops, value); k = stops.findIndex(([v]) => same(v, value)) }
      slider.max = stops.length - 1
      slider.value = k
      output.textContent = stops[k][1]
      slider.setAttribute("aria-valuetext", stops[k][1])
    }
    return { parts: [output, slider], show }
  }

  pair({ name, options }) {
    const buttons = options.map(([value, caption]) => make("button", { textContent: caption, onclick: () => this.set(name, value) }))
    const box = make("div", { className: "pair", attributes: { role: "group", "aria-labelledby": `name-${name}` } }, ...buttons)
    return { parts: [box], show: (value) => buttons.forEach((b, k) => b.setAttribute("aria-pressed", same(options[k][0], value))) }
  }

  makeMaps() {
    const list = at("map")
    list.replaceChildren(...this.content.maps.map((m) => make("option", { value: m.name, textContent: m.symbol ? `${m.caption}, ${m.symbol}` : m.caption })))
    list.onchange = () => this.store.change({ map: list.value }, { stage: "field" })
    this.shown.push({
      show: (state) => {
        this.content.maps.forEach((m, k) => { list.options[k].hidden = list.options[k].disabled = !applies(m, state.sampler) })
        list.value = state.map
        at("mapped").dataset.tip = this.content.maps.find((m) => m.name === state.map)?.help ?? ""
      },
    })
  }

  makeLayers() {
    const buttons = this.content.layers.map(({ name, caption, symbol, help }) => {
      const b = make("button", { textContent: caption, dataset: { layer: name, tip: help }, onclick: () => this.toggle(name) })
      if (symbol) b.append(" ", make("i", { textContent: symbol }))
      return b
    })
    const isLaw = (k) => LAWS.includes(this.content.layers[k].name)
    at("layers").replaceChildren(...buttons.filter((_, k) => !isLaw(k)))
    at("law-layers").replaceChildren(...buttons.filter((_, k) => isLaw(k)))
    this.shown.push({
      show: (state) => this.content.layers.forEach((layer, k) => {
        buttons[k].hidden = !applies(layer, state.sampler)
        buttons[k].setAttribute("aria-pressed", state.layers.includes(layer.name))
      }),
    })
  }

  toggle(name) {
    const { layers } = this.store.state
    this.store.change({ layers: layers.includes(name) ? layers.filter((l) => l !== name) : [...layers, name] })
  }

  show(state) { for (const { show } of this.shown) show(state) }
}

const size = (v) => (v === "inf" ? Infinity : Number(v))

// Inserts a value where it keeps the order of the stops; beyond both ends if there is no such place.
function inserted(stops, value) {
  const v = size(value), found = [...stops], stop = [value, value === "inf" ? "∞" : String(Number(Number(value).toPrecision(4)))]
  const k = stops.findIndex(([a], i) => i + 1 < stops.length && (size(a) - v) * (size(stops[i + 1][0]) - v) < 0)
  const first = size(stops[0][0]), last = size(stops.at(-1)[0])
  if (k >= 0) found.splice(k + 1, 0, stop)
  else if (Math.abs(v - first) < Math.abs(v - last)) found.unshift(stop)
  else found.push(stop)
  return found
}
