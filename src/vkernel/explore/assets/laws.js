// Laws, where samples end. In the plane a picture, on the line a curve; blue is mass that copies, orange mass that does not.
import { WINDOW } from "./axes.js"
import { ink, isDark, lawRamps, picture } from "./colours.js"
import { distinct, isCopy } from "./copies.js"

const pictures = new WeakMap()  // by array of values, and then by theme: a law does not change
const FILL = 0.45

const centre = (k, count) => -WINDOW + ((k + 0.5) / count) * 2 * WINDOW

// One scale for all laws of a run, so that they can be compared by eye.
export function lawScale(result) {
  const sorted = Float32Array.from(result.arrays.law.data).sort()
  const peak = sorted[Math.floor((sorted.length - 1) * (result.d === 1 ? 0.995 : 0.999))]
  return { low: 0, high: Math.max(peak, 0.3), power: result.d === 1 ? 1 / 2 : 1 / 3 }
}

export function lawPicture(law, points, scale) {
  const key = `${isDark()} ${scale.high}`, known = pictures.get(law.data)
  if (known?.key === key) return known.sheet
  const [rows, columns] = law.shape, own = distinct(points), { copied, fresh } = lawRamps()
  const ramp = (c, r) => (isCopy(own, centre(c, columns), centre(r, rows)) ? copied : fresh)
  const sheet = picture(law.data, rows, columns, scale, ramp)
  pictures.set(law.data, { key, sheet })
  return sheet
}

const path = (pen, box, count, height) => {
  for (let k = 0; k < count; k++) {
    const x = box.x + ((k + 0.5) / count) * box.w, y = box.y + box.h * (1 - height(k))
    if (k) pen.lineTo(x, y)
    else pen.moveTo(x, y)
  }
}

export const heightOn = (scale) => (v) => Math.min((Math.max(v, 0) / scale.high) ** scale.power, 1.05) / 1.06

export function lawLine(pen, box, values, scale, colour, width = 2, dash = []) {
  const height = heightOn(scale)
  pen.save()
  pen.setLineDash(dash)
  pen.strokeStyle = colour
  pen.lineWidth = width
  pen.lineJoin = "round"
  pen.beginPath()
  path(pen, box, values.length, (k) => height(values[k]))
  pen.stroke()
  pen.restore()
}

// The area under a law on the line, in two colours.
export function lawArea(pen, box, values, points, scale) {
  const own = distinct(points), height = heightOn(scale), step = box.w / values.length, colours = { true: ink("law"), false: ink("exact") }
  pen.save()
  pen.globalAlpha *= FILL
  for (let k = 0; k < values.length; k++) {
    const h = box.h * height(values[k])
    pen.fillStyle = colours[isCopy(own, centre(k, values.length))]
    pen.fillRect(box.x + k * step, box.y + box.h - h, step + 0.4, h)
  }
  pen.restore()
}

// One standard error to both sides.
export function lawBand(pen, box, values, errors, scale, colour) {
  const height = heightOn(scale)
  pen.save()
  pen.globalAlpha *= 0.2
  pen.fillStyle = colour
  pen.beginPath()
  path(pen, box, values.length, (k) => height(values[k] + errors[k]))
  for (let k = values.length - 1; k >= 0; k--) pen.lineTo(box.x + ((k + 0.5) / values.length) * box.w, box.y + box.h * (1 - height(values[k] - errors[k])))
  pen.fill()
  pen.restore()
}
