// The large canvas: its cells, and drawing when something has changed.
import { clamp, lineCell, planeCell } from "./axes.js"
import { describe, drawLegend, items } from "./legend.js"
import { drawLine } from "./line.js"
import { drawPlane } from "./plane.js"
import { drawProbe } from "./probe.js"

const NARROW = 400  // pixels below which two cells on the line stand one below the other
const EDGE = 14  // pixels beside legends, for the first number of a scale

// Boxes of `count` cells: side by side, or stacked where that makes them larger.
export function boxes(width, height, count, d) {
  const larger = Math.min(width, height / count) > 1.1 * Math.min(width / count, height)
  const down = count > 1 && (d === 2 ? larger : width < NARROW), w = down ? width : width / count, h = down ? height / count : height
  return Array.from({ length: count }, (_, k) => ({ x: down ? 0 : k * w, y: down ? k * h : 0, w, h }))
}

export function layout(scene, width, height) {
  const titled = scene.parts.length > 1 || scene.parts[0].titled
  return boxes(width, height, scene.parts.length, scene.state.d).map((box) => (scene.state.d === 2 ? planeCell(box, titled) : lineCell(box, scene.range, titled)))
}

export function drawScene(pen, cells, scene) {
  cells.forEach((cell, k) => {
    if (scene.state.d === 2) drawPlane(pen, cell, scene, scene.parts[k])
    else drawLine(pen, cell, scene, scene.parts[k])
    if (scene.view.stage === "field" || scene.state.d === 1) drawProbe(pen, cell, scene)
  })
}

export class Stage {
  constructor(canvas, legend, sceneOf) {
    Object.assign(this, { canvas, legend, sceneOf, cells: [], dirty: false, legendKey: "" })
    new ResizeObserver(() => this.draw()).observe(canvas.parentElement)
    window.matchMedia(`(resolution: ${window.devicePixelRatio}dppx)`).addEventListener("change", () => this.draw())
  }

  // Draws before the next frame of the screen, once for however many changes.
  draw() {
    if (this.dirty) return
    this.dirty = true
    requestAnimationFrame(() => { this.dirty = false; this.paint() })
  }

  paint() {
    const scene = this.sceneOf(), frame = this.canvas.parentElement, width = frame.clientWidth, height = frame.clientHeight
    if (width < 10 || height < 10) return
    const pen = this.prepare(this.canvas, width, height)
    this.cells = layout(scene, width, height)
    drawScene(pen, this.cells, scene)
    this.paintLegend(scene)
  }

  prepare(canvas, width, height) {
    const scale = window.devicePixelRatio || 1, w = Math.round(width * scale), h = Math.round(height * scale)
    if (canvas.width !== w || canvas.height !== h) Object.assign(canvas, { width: w, height: h })
    const pen = canvas.getContext("2d")
    pen.setTransform(scale, 0, 0, scale, 0, 0)
    pen.clearRect(0, 0, width, height)
    return pen
  }

  paintLegend(scene) {
    const width = this.canvas.parentElement.clientWidth, found = items(scene)
    const key = JSON.stringify([width, scene.state.dark, found.map((i) => i.keys ?? [i.scale, i.caption])])
    if (key === this.legendKey) return
    this.legendKey = key
    const height = drawLegend(this.legend.getContext("2d"), EDGE, 2, width - 2 * EDGE, found, true)
    this.legend.style.height = `${height}px`
    drawLegend(this.prepare(this.legend, width, height), EDGE, 2, width - 2 * EDGE, found)
    this.legend.setAttribute("aria-label", `Legend: ${describe(found)}`)
  }

  // The cell under a place on the screen, or the nearest one.
  cellAt(px, py) {
    const inside = this.cells.find((cell) => cell.inside(px, py))
    return inside ?? null
  }

  nearestCell(px, py) {
    const far = ({ box }) => Math.hypot(px - clamp(px, box.x, box.x + box.w), py - clamp(py, box.y, box.y + box.h))
    return this.cells.reduce((best, cell) => (!best || far(cell) < far(best) ? cell : best), null)
  }
}
