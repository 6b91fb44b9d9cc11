// The tour. Each step is a state with a text, one action and one question; it plays by itself, waits while the user acts,
// and gives the user's own picture back when it ends.
import { at, make, paragraphs } from "./dom.js"

const PER_WORD = 200  // milliseconds to read one
const words = (...texts) => texts.flat().join(" ").split(/\s+/).length

// `page` offers store, clock, select(k), playWhenReady(wanted).
export class Tour {
  constructor(steps, page) {
    Object.assign(this, { steps, page, k: -1, timer: 0, paused: false, spent: 0 })
    at("tour").hidden = !steps.length
    at("tour").onclick = () => (this.k < 0 ? this.start() : this.end())
    at("guide-next").onclick = () => this.next()
    at("guide-back").onclick = () => this.go(this.k - 1)
    at("guide-pause").onclick = () => this.setPaused(!this.paused)
    at("guide-end").onclick = () => this.end()
    at("guide-question").ontoggle = () => { if (at("guide-question").open && !this.told) this.setPaused(true) }
    at("canvas").addEventListener("pointermove", (e) => { if (this.running && e.isTrusted && this.steps[this.k].probe) this.setPaused(true) })
    for (const kind of ["pointerdown", "keydown"]) {  // whoever acts has the time they need
      document.querySelector("main").addEventListener(kind, (e) => { if (this.k >= 0 && e.isTrusted && !e.target.closest("#guide")) this.setPaused(true) }, true)
    }
  }

  get running() { return this.k >= 0 }

  start() {
    this.before = this.page.store.doc
    this.setPaused(window.matchMedia("(prefers-reduced-motion: reduce)").matches)
    this.go(0)
    at("guide-title").focus({ preventScroll: false })
  }

  go(k) {
    const step = this.steps[k], { store, clock } = this.page
    if (!step) return
    this.k = k
    this.spent = 0
    this.told = false  // whether the tour itself has opened the answer
    this.page.endProbe()
    clock.pause()
    this.page.select(0)
    store.change({ ...step.state, dark: store.state.dark }, { stage: step.view ?? "field", shown: step.shown ?? "law", factor: null }, "tour", Infinity)
    this.fill(step)
    this.page.playWhenReady(!!step.play && !window.matchMedia("(prefers-reduced-motion: reduce)").matches)
    this.run()
  }

  fill(step) {
    const last = this.k === this.steps.length - 1
    at("guide").hidden = false
    at("app").classList.add("touring")
    at("guide-count").textContent = `${this.k + 1} of ${this.steps.length}`
    at("guide-title").textContent = step.title
    const texts = [step.text].flat()
    at("guide-text").replaceChildren(...(texts.length > 1 ? [make("ul", {}, ...texts.map((t) => make("li", { textContent: t })))] : paragraphs(texts)))
    at("guide-action").textContent = step.action ?? ""
    at("guide-action").hidden = !step.action
    const question = at("guide-question")
    question.hidden = !step.question
    question.open = false
    for (const old of document.querySelectorAll(".pointed")) old.classList.remove("pointed")
    if (step.control) at(step.control).classList.add("pointed")
    question.querySelector("summary").textContent = step.question ?? ""
    question.querySelector("p").textContent = step.answer ?? ""
    at("guide-back").disabled = this.k === 0
    at("guide-next").textContent = last ? "Done" : "Next"
    if (step.control) at(step.control).scrollIntoView({ block: "nearest" })
    at("guide").scrollIntoView({ block: "nearest" })
    at("tour").textContent = "End the tour"
  }

  // Counts the time of the step that has passed; a pause stops the count. Its last part is for the answer.
  run() {
    clearInterval(this.timer)
    const step = this.steps[this.k], last = this.k === this.steps.length - 1
    const first = Math.max(1000 * (step.seconds ?? 10), PER_WORD * words(step.text, step.action, step.question))
    const whole = first + 1000 + PER_WORD * words(step.answer)
    let before = performance.now()
    this.timer = setInterval(() => {
      const now = performance.now()
      if (!this.paused && !document.hidden) this.spent += now - before
      before = now
      at("guide-clock").style.width = last ? "100%" : `${Math.min(100 * this.spent / whole, 100)}%`
      if (!this.paused) this.demonstrate(step, this.spent / first)
      if (this.spent > first && step.question && !this.told) this.tell(step)
      if (this.spent > whole && !last) this.go(this.k + 1)
    }, 200)
  }

  // Whoever only watches sees the action done, and the answer.
  tell(step) {
    this.told = true
    at("guide-question").open = true
    if (step.act) this.page.store.change(step.act, step.act.compare ? { stage: "outcome" } : {}, "tour", Infinity)
    if (step.press) at(step.press).click()
  }

  // Moves the probe over the places of a step, one after the other.
  demonstrate(step, share) {
    if (!step.probe) return
    const k = Math.min(Math.floor(share * (step.probe.length + 1)) - 1, step.probe.length - 1)
    if (k >= 0 && this.shown !== `${this.k} ${k}`) { this.shown = `${this.k} ${k}`; this.page.probeAt(step.probe[k]) }
  }

  next() { if (this.k === this.steps.length - 1) this.end(); else this.go(this.k + 1) }

  setPaused(paused) {
    this.paused = paused
    at("guide-pause").textContent = paused ? "Resume" : "Pause"
    at("guide-pause").setAttribute("aria-pressed", paused)
  }

  end() {
    if (this.k < 0) return
    clearInterval(this.timer)
    this.k = -1
    at("guide").hidden = true
    this.shown = null
    this.page.endProbe()
    for (const old of document.querySelectorAll(".pointed")) old.classList.remove("pointed")
    at("app").classList.remove("touring")
    at("tour").textContent = "Guided tour"
    this.page.playWhenReady(false)
    this.page.clock.pause()
    const { store } = this.page
    store.change({ ...this.before.state, dark: store.state.dark }, this.before.view)
    at("tour").focus()
  }
}
