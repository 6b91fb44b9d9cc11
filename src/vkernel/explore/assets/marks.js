// Marks that several pictures share: arrows, particles, training points.
import { ink } from "./colours.js"

const CROWD = 200  // points above which they are drawn small

export function arrow(pen, x0, y0, x1, y1, colour, width = 1.5) {
  const length = Math.hypot(x1 - x0, y1 - y0)
  if (length < 0.5) return
  const head = Math.min(4 + width, length * 0.6), angle = Math.atan2(y1 - y0, x1 - x0)
  pen.strokeStyle = pen.fillStyle = colour
  pen.lineWidth = width
  pen.beginPath()
  pen.moveTo(x0, y0)
  pen.lineTo(x1 - Math.cos(angle) * head * 0.7, y1 - Math.sin(angle) * head * 0.7)
  pen.stroke()
  pen.beginPath()
  pen.moveTo(x1, y1)
  for (const side of [-0.45, 0.45]) pen.lineTo(x1 - Math.cos(angle + side) * head, y1 - Math.sin(angle + side) * head)
  pen.fill()
}

// A particle: filled with orange if its sample will be new.
export function dot(pen, x, y, copy, bright, size = 2.6) {
  pen.beginPath()
  pen.arc(x, y, copy ? size : size + 0.8, 0, 2 * Math.PI)
  pen.fillStyle = copy ? bright : ink("fresh")
  pen.fill()
  pen.lineWidth = 0.8
  pen.strokeStyle = copy && bright !== "#ffffff" ? ink("paper") : "rgb(0 0 0 / 65%)"
  pen.stroke()
}

export function pointSize(weight, count) {
  return count > CROWD ? 3 : Math.min(6 + 1.5 * Math.sqrt(weight - 1), 16)
}

export function trainingPoints(pen, cell, scene, hollow) {
  const { points, weights } = scene.state, many = points.length > CROWD
  points.forEach((point, k) => {
    const [x, y] = cell.at(point), size = pointSize(weights[k] ?? 1, points.length)
    pen.beginPath()
    pen.arc(x, y, size, 0, 2 * Math.PI)
    if (!hollow) { pen.fillStyle = ink("point"); pen.fill() }
    pen.lineWidth = many ? 0.8 : 2
    pen.strokeStyle = hollow ? ink("ink") : "#ffffff"
    pen.stroke()
    if (k !== scene.selected) return
    pen.beginPath()
    pen.arc(x, y, size + 4, 0, 2 * Math.PI)
    pen.lineWidth = 2
    pen.strokeStyle = ink("accent")
    pen.stroke()
  })
}
