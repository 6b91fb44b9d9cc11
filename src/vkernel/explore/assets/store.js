// The state of the page and its history. A document is {state, view}: `state` goes to the server and into the address,
// `view` says what is shown large. Documents are never modified, so that undo is a list of old ones.
const TOGETHER = 900  // milliseconds within which changes with one key are one step of undo
const DEEPEST = 300

export class Store {
  constructor(doc) {
    this.doc = doc
    this.past = []
    this.future = []
    this.held = null  // the document before the drag that is going on
    this.listeners = []
    this.last = { key: null, time: 0 }
  }

  get state() { return this.doc.state }
  get view() { return this.doc.view }

  listen(listener) { this.listeners.push(listener) }

  // A change that the user can undo. Changes with the same key that follow each other soon are undone together.
  change(patch, view = {}, key = null, together = TOGETHER) {
    const now = performance.now(), same = key !== null && key === this.last.key && now - this.last.time < together
    if (!same) this.remember(this.held ?? this.doc)
    this.held = null
    this.last = { key, time: now }
    this.put(patch, view)
  }

  // Changes between hold() and release() are one step of undo, such as a drag.
  hold() { this.held ??= this.doc }
  preview(patch) { this.hold(); this.put(patch, {}) }
  release() {
    const before = this.held
    this.held = null
    this.last = { key: null, time: 0 }
    if (before && before !== this.doc) { this.remember(before); this.tell() }
  }

  // Corrections by the server, such as a time clamped to the range of a new process, are no step of their own.
  correct(patch) { this.put(patch, {}) }

  undo() { this.travel(this.past, this.future) }
  redo() { this.travel(this.future, this.past) }

  travel(from, to) {
    this.release()
    const doc = from.pop()
    if (!doc) return
    to.push(this.doc)
    this.last = { key: null, time: 0 }
    this.doc = doc
    this.tell()
  }

  remember(doc) {
    this.past.push(doc)
    if (this.past.length > DEEPEST) this.past.shift()
    this.future = []
  }

  put(patch, view) {
    const state = { ...this.doc.state, ...patch }
    this.doc = { state: { ...state, d: state.points[0].length }, view: { ...this.doc.view, ...view } }
    this.tell()
  }

  tell() { for (const listener of this.listeners) listener(this.doc) }
}
