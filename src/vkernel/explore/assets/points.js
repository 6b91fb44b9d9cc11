// Editing of training points on the canvas: press to add, drag to move, keys for everything; and the probe that follows
// the pointer. The browser owns the points: they are drawn where the hand has put them, before the server has answered.
import { toWindow } from "./axes.js"
import { pointSize } from "./marks.js"

const REACH = { mouse: 6, pen: 10, touch: 16 }  // pixels beyond a point that still hit it
const STILL = 8  // pixels that a finger may move during a tap or a long press
const LONG = 450  // milliseconds of a long press
const STEP = 0.05, FAR = 0.2
const MOVES = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowDown: [0, -1], ArrowUp: [0, 1] }

// `page` offers store, stage, selected, select(k), probeAt(x, t), endProbe(), pinned, notice(text), say(text), limits.
export function editPoints(canvas, page) {
  const { store, stage } = page
  let drag = null, press = null

  const where = (event) => {
    const box = canvas.getBoundingClientRect()
    return [event.clientX - box.left, event.clientY - box.top]
  }

  const hit = (px, py, kind) => {
    const cell = stage.cellAt(px, py) ?? stage.nearestCell(px, py), { points, weights } = store.state
    let best = -1, least = Infinity
    points.forEach((point, k) => {
      const [x, y] = cell.at(point), distance = Math.hypot(px - x, py - y) - pointSize(weights[k] ?? 1, points.length)
      if (distance <= REACH[kind] && distance < least) { best = k; least = distance }
    })
    return best
  }

  const move = (k, point) => store.preview({ points: store.state.points.map((old, i) => (i === k ? point : old)) })

  const begin = (k, cell, id) => {
    drag = { k, cell }
    page.select(k)
    page.endProbe()
    canvas.setPointerCapture(id)
    canvas.classList.add("dragging")
  }

  const probe = (px, py) => {
    const cell = stage.cellAt(px, py)
    if (!cell) { if (!page.pinned) page.endProbe(); return }
    page.probeAt(cell.place(px, py), cell.timeAt(py))
  }

  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0 || drag) return
    const [px, py] = where(event), k = hit(px, py, event.pointerType), cell = stage.cellAt(px, py)
    if (k >= 0) {
      store.hold()
      begin(k, cell ?? stage.nearestCell(px, py), event.pointerId)
    } else if (event.pointerType === "touch") {
      press = { px, py, long: setTimeout(() => { press.probing = true; probe(px, py) }, LONG) }
    } else if (page.pinned) probe(px, py)
    else if (cell) {
      store.hold()
      if (page.add(cell.place(px, py), true)) begin(store.state.points.length - 1, cell, event.pointerId)
      else store.release()
    }
  })

  canvas.addEventListener("pointermove", (event) => {
    const [px, py] = where(event)
    if (drag) {
      const point = drag.cell.place(px, py)
      if (point.some((v, c) => v !== store.state.points[drag.k][c])) move(drag.k, point)
    } else if (press) {
      if (press.probing) probe(px, py)
      else if (Math.hypot(px - press.px, py - press.py) > STILL) { clearTimeout(press.long); press = null }
    } else if (event.pointerType !== "touch") {
      canvas.classList.toggle("over", hit(px, py, event.pointerType) >= 0)
      if (!page.pinned) probe(px, py)
    }
  })

  const finish = (event, cancelled) => {
    canvas.classList.remove("dragging")
    if (drag) {
      drag = null
      store.release()
    } else if (press) {
      clearTimeout(press.long)
      const { px, py, probing } = press
      press = null
      if (probing) { if (!page.pinned) page.endProbe(); return }
      const cell = stage.cellAt(px, py)
      if (cancelled || !cell) return
      if (page.pinned) probe(px, py)
      else page.add(cell.place(px, py))
    }
  }
  canvas.addEventListener("pointerup", (event) => finish(event, false))
  canvas.addEventListener("pointercancel", (event) => finish(event, true))
  canvas.addEventListener("pointerleave", () => { if (!drag && !page.pinned && !press) page.endProbe() })
  canvas.addEventListener("contextmenu", (event) => { if (press || drag) event.preventDefault() })

  // A finger on a point drags it; elsewhere, unless it probes, it scrolls the page.
  canvas.addEventListener("touchstart", (event) => {
    if (event.touches.length !== 1) return
    const [touch] = event.touches
    if (hit(...where(touch), "touch") >= 0) event.preventDefault()
  }, { passive: false })
  canvas.addEventListener("touchmove", (event) => { if (drag || press?.probing) event.preventDefault() }, { passive: false })

  const nudge = (way, far) => {
    const k = page.selected, point = store.state.points[k], step = far ? FAR : STEP
    const to = point.map((v, c) => toWindow(v + step * way[c]))
    store.change({ points: store.state.points.map((old, i) => (i === k ? to : old)) }, {}, `move ${k}`)
    page.say(`point ${k + 1} at ${to.join(", ")}`)
  }

  canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return
    const way = MOVES[event.key], turn = { PageUp: -1, PageDown: 1 }[event.key]
    const acts = {
      Insert: () => page.add(null), Delete: page.remove, Backspace: page.remove,
      p: page.pin, P: page.pin,
    }
    if (way && page.pinned) page.moveProbe(way, event.shiftKey)
    else if (way) nudge(way, event.shiftKey)
    else if (turn) page.pick(turn)
    else if (acts[event.key]) acts[event.key]()
    else return
    event.preventDefault()
  })
}
