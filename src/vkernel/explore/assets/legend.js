// Legends: the scale of the map, the scale of laws, and what marks and lines mean. Drawn on a canvas, so that the saved
// picture has them too.
import { FONT, label } from "./axes.js"
import { ink, lawRamps, number, onScale, ramps, ticks } from "./colours.js"

const BAR = { width: 132, height: 9 }
const ROW = 36, GAP = 26

// What there is to explain in a scene, as a list of items.
export function items(scene) {
  const found = [], { map, result, layers, state, view } = scene, outcome = state.d === 2 && view.stage === "outcome"
  if (!outcome && map?.sheet) found.push({ scale: map.scale, tables: [ramps.map], caption: map.scale.caption, unit: map.scale.unit })
  if (outcome && result) {
    const { copied, fresh } = lawRamps()
    found.push({ scale: result.scale, tables: [copied, fresh], caption: "density of samples, copies blue, new orange", unit: "cube-root scale" })
  }
  const keys = []
  if (!outcome && layers.has("particles") && result) keys.push({ dot: "copied", text: "will copy a point" }, { dot: "fresh", text: "will be new" })
  if (state.d === 1 && result) {
    if (layers.has("law")) keys.push({ area: "law", text: "copied" }, { area: "exact", text: "new" })
    if (layers.has("members") && result.arrays.members) keys.push({ line: "members", text: "single models" })
    if (layers.has("exact")) keys.push({ line: "ink", dash: true, text: "exact score" })
  }
  if (!outcome && layers.has("arrows")) {
    if (map?.exactArrows) keys.push({ arrow: "arrow", text: "model's score" }, { arrow: "soft", text: "exact score" })
    else keys.push({ arrow: "ink", text: "exact score s" })
  }
  if (!outcome && layers.has("boundaries")) keys.push({ line: "ink", text: "boundaries" })
  if (!outcome && scene.probe?.answer) keys.push({ line: "point", text: "origins, by probability" }, { arrow: "ink", text: "single targets" }, { arrow: "spread", text: "their mean, and spread" })
  if (keys.length) found.push({ keys })
  return found
}

export const describe = (found) => found.map((item) => item.keys ? item.keys.map((k) => k.text).join(", ") : `${item.caption}, from ${number(item.scale.low)} to ${number(item.scale.high)}${item.unit ? `, ${item.unit}` : ""}`).join("; ")

// Draws items from the left, in new rows where they do not fit; returns the height that they take. Without a pen that
// draws (`dry`) it only measures.
export function drawLegend(pen, x0, y0, width, found, dry = false) {
  let x = x0, y = y0
  pen.font = `12px ${FONT}`
  const next = (size) => { if (x > x0 && x + size > x0 + width) { x = x0; y += ROW } }
  for (const item of found) {
    if (item.scale) {
      const whole = `${item.caption}${item.unit ? ` (${item.unit})` : ""}`, text = pen.measureText(whole).width > width ? item.caption : whole
      const size = Math.max(BAR.width * item.tables.length + 14 * (item.tables.length - 1), pen.measureText(text).width) + 6
      next(size)
      if (!dry) drawScale(pen, x, y, item, text)
      x += size + GAP
    } else x = drawKeys(pen, x, y, x0, width, item.keys, dry, (row) => { y = row })
  }
  return y + ROW - y0
}

function drawScale(pen, x, y, item, text) {
  label(pen, text, x, y + 6, "left", "middle", 12, ink("ink"))
  item.tables.forEach((table, n) => {
    const left = x + n * (BAR.width + 14), place = onScale(item.scale)
    for (let k = 0; k < BAR.width; k++) {
      const c = 3 * Math.round((k / (BAR.width - 1)) * 255)
      pen.fillStyle = `rgb(${table[c]} ${table[c + 1]} ${table[c + 2]})`
      pen.fillRect(left + k, y + 14, 1.5, BAR.height)
    }
    pen.strokeStyle = ink("line")
    pen.lineWidth = 1
    pen.strokeRect(left - 0.5, y + 13.5, BAR.width + 2, BAR.height + 1)
    for (const v of ticks(item.scale)) label(pen, `${item.scale.open && v === item.scale.high ? "≥ " : ""}${number(v)}`, left + place(v) * BAR.width, y + 30, "center", "middle", 10.5)
  })
}

function drawKeys(pen, x, y, x0, width, keys, dry, moved) {
  let line = 0, left = x, at = x
  for (const key of keys) {
    pen.font = `12px ${FONT}`  // others were set between
    const size = pen.measureText(key.text).width + 24
    if (at > left && at + size > x0 + width) {
      line++
      at = left
      if (line === 2) { line = 0; left = at = x0; y += ROW }
    } else if (at + size > x0 + width && at > x0) { left = at = x0; y += ROW; line = 0 }
    if (!dry) drawKey(pen, at, y + 8 + 17 * line, key)
    at += size + 6
  }
  moved(y)
  return at + GAP
}

function drawKey(pen, x, y, key) {
  pen.save()
  pen.lineWidth = 2
  if (key.dot) {
    pen.beginPath()
    pen.arc(x + 8, y, key.dot === "copied" ? 3 : 4, 0, 7)
    pen.fillStyle = key.dot === "copied" ? "#ffffff" : ink("fresh")
    pen.fill()
    pen.lineWidth = 1
    pen.strokeStyle = "rgb(0 0 0 / 65%)"
    pen.stroke()
  } else if (key.area) {
    pen.globalAlpha = 0.55
    pen.fillStyle = ink(key.area)
    pen.fillRect(x, y - 5, 16, 10)
  } else {
    pen.strokeStyle = pen.fillStyle = ink(key.line ?? key.arrow)
    if (key.dash) pen.setLineDash([4, 3])
    pen.beginPath()
    pen.moveTo(x, y)
    pen.lineTo(x + 16, y)
    pen.stroke()
    if (key.arrow) { pen.beginPath(); pen.moveTo(x + 18, y); pen.lineTo(x + 11, y - 4); pen.lineTo(x + 11, y + 4); pen.fill() }
  }
  pen.restore()
  label(pen, key.text, x + 22, y, "left", "middle", 12, ink("soft"))
}
