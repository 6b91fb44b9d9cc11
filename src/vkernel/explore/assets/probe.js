// The probe: what training shows a model at one place x and time t. Lines lead to the training points by posterior
// weight, thin arrows are single targets, the thick one is their mean σ² s, and the ellipse is the spread σ² C^½.
import { clamp } from "./axes.js"
import { ink, number } from "./colours.js"
import { arrow } from "./marks.js"

const COLOUR = "#ffffff", SHADE = "rgb(0 0 0 / 60%)"

export function drawProbe(pen, cell, scene) {
  const { probe } = scene
  if (!probe) return
  const [x, y] = cell.d === 2 ? cell.at(probe.x) : [cell.X(probe.x[0]), cell.Y(probe.t)]
  const answer = probe.answer
  pen.save()
  pen.lineCap = "round"
  if (answer?.arrays.weights) {
    lines(pen, cell, scene, answer, x, y)
    targets(pen, cell, answer, x, y)
    mean(pen, cell, answer, x, y)
  }
  pen.beginPath()
  pen.arc(x, y, 5, 0, 7)
  pen.lineWidth = 4
  pen.strokeStyle = SHADE
  pen.stroke()
  pen.lineWidth = 2
  pen.strokeStyle = COLOUR
  pen.stroke()
  pen.restore()
}

function stroke(pen, width, colour, draw) {
  for (const [w, c] of [[width + 2, SHADE], [width, colour]]) {
    pen.beginPath()
    draw()
    pen.lineWidth = w
    pen.strokeStyle = c
    pen.stroke()
  }
}

function lines(pen, cell, scene, answer, x, y) {
  answer.arrays.weights.data.forEach((w, k) => {
    const point = scene.state.points[answer.which[k]]
    if (!point) return  // the answer is older than the points
    const [px, py] = cell.at(point)
    pen.globalAlpha = clamp(0.25 + w, 0.25, 1)
    stroke(pen, 1 + 5 * w, ink("point"), () => { pen.moveTo(x, y); pen.lineTo(px, py) })
  })
  pen.globalAlpha = 1
}

// A displacement at the probe, in pixels; on the line it is horizontal.
const shift = (cell, data, k, d) => [data[k * d] * cell.unit, d === 2 ? -data[k * d + 1] * cell.unit : 0]

function targets(pen, cell, answer, x, y) {
  const { targets: found } = answer.arrays
  if (!found) return
  const [count, d] = found.shape, groups = new Map()  // equal targets are one arrow, the thicker the more there are
  for (let k = 0; k < count; k++) {
    const way = shift(cell, found.data, k, d), key = way.map(Math.round).join()
    groups.set(key, { way, times: (groups.get(key)?.times ?? 0) + 1 })
  }
  let lift = 0
  for (const { way: [dx, dy], times } of groups.values()) {
    if (d === 1) lift -= 8  // on the line arrows lie above each other
    for (const [colour, wider] of [[SHADE, 1.6], [COLOUR, 0]]) arrow(pen, x, y + lift, x + dx, y + dy + lift, colour, 0.8 + 2 * times / count + wider)
  }
}

function mean(pen, cell, answer, x, y) {
  const { mean: found, ellipse } = answer.arrays, d = found.data.length, [dx, dy] = shift(cell, found.data, 0, d)
  if (ellipse) {
    const axes = Array.from({ length: ellipse.shape[0] }, (_, k) => shift(cell, ellipse.data, k, d))
    stroke(pen, 1.6, ink("spread"), () => {
      if (d === 1) {  // a bar with ends: one standard deviation to both sides of the mean
        const half = Math.abs(axes[0][0])
        pen.moveTo(x + dx - half, y); pen.lineTo(x + dx + half, y)
        for (const side of [-half, half]) { pen.moveTo(x + dx + side, y - 6); pen.lineTo(x + dx + side, y + 6) }
        return
      }
      for (let k = 0; k <= 48; k++) {
        const a = (2 * Math.PI * k) / 48, c = Math.cos(a), s = Math.sin(a)
        pen.lineTo(x + dx + c * axes[0][0] + s * (axes[1]?.[0] ?? 0), y + dy + c * axes[0][1] + s * (axes[1]?.[1] ?? 0))
      }
    })
  }
  arrow(pen, x, y, x + dx, y + dy, SHADE, 5)
  arrow(pen, x, y, x + dx, y + dy, ink("spread"), 3)
}

// The small text beside the probe.
export function describe(answer, x, t) {
  const head = `x = ${x.map(number).join(", ")} · t = ${number(t)}`
  const rest = answer?.text ? [answer.text].flat() : []
  return [head, ...rest]
}
