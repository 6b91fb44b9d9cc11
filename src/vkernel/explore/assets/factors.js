// Six factors that may decide what is copied and what is new, each as two states of the page: A or B.
import { at, make, paragraphs } from "./dom.js"

const relevant = ({ state }) => JSON.stringify([state.points, state.weights, state.process, state.sampler, state.features, state.ratio, state.tau, state.K, state.eps, state.steps])

export class Factors {
  constructor(factors, store) {
    this.rows = factors.map((factor) => {
      const buttons = [factor.a, factor.b].map((side, k) => make("button", {
        textContent: side.caption, onclick: () => this.choose(factor, side),
        attributes: { "aria-label": `${factor.caption}: ${"AB"[k]}, ${side.caption}` },
      }))
      const box = make("div", { className: "factor", dataset: { tip: factor.question ?? "" } }, make("span", { className: "name", textContent: factor.caption }),
        make("div", { className: "pair" }, ...buttons))
      return { factor, buttons, box }
    })
    this.store = store
    at("factors").replaceChildren(...this.rows.map((row) => row.box))
    at("factors-card").hidden = !factors.length
  }

  choose(factor, side) {
    this.store.change({ ...side.state, dark: this.store.state.dark }, { shown: "law", stage: side.state.points[0].length === 2 ? "outcome" : "field", factor: factor.name })
  }

  show(doc) {
    const now = relevant(doc)
    let current = null
    for (const { factor, buttons } of this.rows) {
      const active = doc.view.factor === factor.name, sides = [factor.a, factor.b].map((side) => active && relevant(side) === now)
      buttons.forEach((b, k) => b.setAttribute("aria-pressed", sides[k]))
      if (sides.some(Boolean)) current = factor
    }
    at("factors-text").hidden = !current
    this.rows.find((row) => row.factor === current)?.box.after(at("factors-text"))
    if (current) at("factors-text").replaceChildren(...paragraphs([current.question, current.text]))
  }
}
