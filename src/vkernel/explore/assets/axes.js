// Geometry on the screen: where the window [-2, 2], times and densities lie in a cell of the picture, and its axes.
import { ink, number } from "./colours.js"

export const WINDOW = 2
export const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "Liberation Sans", sans-serif'
const MARGIN = { plane: { left: 26, right: 6, top: 8, bottom: 22 }, line: { left: 40, right: 10, top: 8, bottom: 22 } }
const TITLE = 20  // height of a cell's title
const STRIP = 30  // height of the strip of training points on the line

export const clamp = (v, low, high) => Math.min(Math.max(v, low), high)
export const toWindow = (v) => Number(clamp(v, -WINDOW, WINDOW).toFixed(3)) + 0

// A square in the plane, centred in its box.
export function planeCell(box, titled) {
  const m = MARGIN.plane, top = m.top + (titled ? TITLE : 0)
  const side = Math.max(Math.min(box.w - m.left - m.right, box.h - top - m.bottom), 20)
  const x = box.x + m.left + (box.w - m.left - m.right - side) / 2, y = box.y + top + Math.max((box.h - top - m.bottom - side) / 2, 0)
  const X = (v) => x + ((v + WINDOW) / (2 * WINDOW)) * side, Y = (v) => y + ((WINDOW - v) / (2 * WINDOW)) * side
  return {
    d: 2, box: { x, y, w: side, h: side }, unit: side / (2 * WINDOW), X, Y,
    at: (point) => [X(point[0]), Y(point[1])],
    place: (px, py) => [toWindow(((px - x) / side) * 2 * WINDOW - WINDOW), toWindow(WINDOW - ((py - y) / side) * 2 * WINDOW)],
    inside: (px, py) => px >= x && px <= x + side && py >= y && py <= y + side,
    timeAt: () => null,
  }
}

// On the line: places and times above (noise at the top, data at the bottom), training points, and the law below.
export function lineCell(box, range, titled) {
  const m = MARGIN.line, top = box.y + m.top + (titled ? TITLE : 0), x = box.x + m.left, w = Math.max(box.w - m.left - m.right, 20)
  const free = Math.max(box.y + box.h - m.bottom - top - STRIP, 40), high = Math.round(free * 0.58)
  const times = { x, y: top, w, h: high }, strip = { x, y: top + high, w, h: STRIP }
  const law = { x, y: top + high + STRIP, w, h: free - high }
  const X = (v) => x + ((v + WINDOW) / (2 * WINDOW)) * w, [eps, T] = range, span = Math.log(T / eps) || 1
  return {
    d: 1, box: { x, y: top, w, h: free + STRIP }, times, strip, law, unit: w / (2 * WINDOW), X,
    Y: (t) => times.y + (Math.log(T / clamp(t, eps, T)) / span) * times.h,
    at: (point) => [X(point[0]), strip.y + strip.h / 2],
    place: (px) => [toWindow(((px - x) / w) * 2 * WINDOW - WINDOW)],
    inside: (px, py) => px >= x && px <= x + w && py >= top && py <= top + free + STRIP,
    timeAt: (py) => (py >= times.y && py <= times.y + times.h ? T * Math.exp((-(py - times.y) / times.h) * span) : null),
  }
}

export function label(pen, text, x, y, align = "center", baseline = "middle", size = 11.5, colour = ink("soft"), weight = 400) {
  pen.font = `${weight} ${size}px ${FONT}`
  pen.fillStyle = colour
  pen.textAlign = align
  pen.textBaseline = baseline
  pen.fillText(text, x, y)
}

// The title of a cell, smaller where the cell is narrow.
export function title(pen, cell, text) {
  pen.font = `600 13px ${FONT}`
  const size = Math.max(Math.min(13, (13 * (cell.box.w + 24)) / pen.measureText(text).width), 9)
  label(pen, text, cell.box.x + cell.box.w / 2, cell.box.y - 12, "center", "middle", size, ink("ink"), 600)
}

function tick(pen, x0, y0, x1, y1) {
  pen.beginPath()
  pen.moveTo(x0, y0)
  pen.lineTo(x1, y1)
  pen.stroke()
}

export function planeAxes(pen, cell) {
  const { x, y, h } = cell.box
  pen.strokeStyle = ink("soft")
  pen.lineWidth = 1
  for (let v = -WINDOW; v <= WINDOW; v++) {
    tick(pen, cell.X(v), y + h, cell.X(v), y + h + 3)
    label(pen, number(v), cell.X(v), y + h + 12)
    tick(pen, x - 3, cell.Y(v), x, cell.Y(v))
    label(pen, number(v), x - 6, cell.Y(v), "right")
  }
}

export function lineAxes(pen, cell, range, top) {
  const { law, times } = cell
  pen.strokeStyle = ink("soft")
  pen.lineWidth = 1
  for (let v = -WINDOW; v <= WINDOW; v++) {
    tick(pen, cell.X(v), law.y + law.h, cell.X(v), law.y + law.h + 3)
    label(pen, number(v), cell.X(v), law.y + law.h + 12)
  }
  tick(pen, law.x, law.y + law.h, law.x + law.w, law.y + law.h)
  for (let k = Math.ceil(Math.log10(range[0]) - 1e-6); k <= Math.log10(range[1]) + 1e-6; k++) {
    tick(pen, times.x - 3, cell.Y(10 ** k), times.x, cell.Y(10 ** k))
    label(pen, number(10 ** k), times.x - 6, cell.Y(10 ** k), "right")
  }
  sideways(pen, "time t", times.x - 32, times.y + times.h / 2)
  if (!top) return
  for (const v of [top / 16, top / 4, top].map((v) => Number(v.toPrecision(1)))) {
    const y = law.y + law.h * (1 - Math.sqrt(v / top) / 1.06)
    if (y < law.y - 1) continue
    tick(pen, law.x - 3, y, law.x, y)
    label(pen, number(v), law.x - 6, y, "right")
  }
  sideways(pen, "density, √ scale", law.x - 32, law.y + law.h / 2)
}

function sideways(pen, text, x, y) {
  pen.save()
  pen.translate(x, y)
  pen.rotate(-Math.PI / 2)
  label(pen, text, 0, 0)
  pen.restore()
}
