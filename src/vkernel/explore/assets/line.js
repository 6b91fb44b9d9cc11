// One cell on the line. Above, places and times: the map, paths of particles from noise (top) to data (bottom), the time
// t as a line. Between, the training points. Below, the law of the samples.
import { label, lineAxes, title } from "./axes.js"
import { ink } from "./colours.js"
import { lawArea, lawBand, lawLine } from "./laws.js"
import { arrow, dot, trainingPoints } from "./marks.js"

const TRAILS = 70  // paths that are drawn; all particles are

export function drawLine(pen, cell, scene, part) {
  if (part.title) title(pen, cell, part.title)
  lineAxes(pen, cell, scene.range, scene.result?.scale.high)
  clipped(pen, cell.times, () => drawTimes(pen, cell, scene, part))
  guides(pen, cell, scene)
  clipped(pen, cell.law, () => drawLaws(pen, cell, scene, part))
  trainingPoints(pen, cell, scene, false)
}

function clipped(pen, box, draw) {
  pen.save()
  pen.beginPath()
  pen.rect(box.x, box.y, box.w, box.h)
  pen.clip()
  draw()
  pen.restore()
}

// Thin lines from the training points to their place in the law.
function guides(pen, cell, scene) {
  if (scene.state.points.length > 60) return
  pen.save()
  pen.setLineDash([2, 4])
  pen.strokeStyle = ink("point")
  pen.globalAlpha = 0.6
  pen.lineWidth = 1
  for (const [x] of scene.state.points) {
    pen.beginPath()
    pen.moveTo(cell.X(x), cell.strip.y)
    pen.lineTo(cell.X(x), cell.law.y + cell.law.h)
    pen.stroke()
  }
  pen.restore()
}

function drawTimes(pen, cell, scene, part) {
  const { times } = cell, { map, layers } = scene
  pen.fillStyle = ink("ground")
  pen.fillRect(times.x, times.y, times.w, times.h)
  if (map?.sheet) {
    pen.drawImage(map.sheet, times.x, times.y, times.w, times.h)
  }
  const bright = map?.sheet ? "#ffffff" : ink("ink"), y = cell.Y(scene.t)
  if (layers.has("particles") && part.paths) trails(pen, cell, scene, part.paths, bright)
  pen.strokeStyle = bright
  pen.lineWidth = 1.5
  pen.globalAlpha = 0.9
  pen.beginPath()
  pen.moveTo(times.x, y)
  pen.lineTo(times.x + times.w, y)
  pen.stroke()
  pen.globalAlpha = 1
  label(pen, "random starts", times.x + times.w - 6, times.y + 9, "right", "middle", 11, bright)
  label(pen, "data", times.x + times.w - 6, times.y + times.h - 8, "right", "middle", 11, bright)
  if (layers.has("boundaries") && map) places(pen, cell, map, y, bright)
  if (layers.has("arrows") && map) {
    if (map.exactArrows) row(pen, cell, map.exactArrows, y - 9, bright)
    if (map.arrows) row(pen, cell, map.arrows, map.exactArrows ? y + 9 : y - 9, map.exactArrows ? ink("arrow") : bright)
  }
  if (layers.has("particles") && part.paths) particles(pen, cell, scene, part.paths, bright, y)
}

function trails(pen, cell, scene, paths, bright) {
  const [now] = paths.between(scene.t), n = paths.count, every = Math.max(Math.round(n / TRAILS), 1)
  const here = paths.at(scene.t)
  pen.lineWidth = 1
  for (let k = 0; k < n; k += every) {
    pen.strokeStyle = paths.copies[k] ? bright : ink("fresh")
    pen.globalAlpha = (paths.copies[k] ? 0.28 : 0.75) * (scene.stale ? 0.4 : 1)
    pen.beginPath()
    for (let s = 0; s <= now; s++) pen.lineTo(cell.X(paths.frames[s * n + k]), cell.Y(paths.times[s]))
    pen.lineTo(cell.X(here[k]), cell.Y(scene.t))
    pen.stroke()
  }
  pen.globalAlpha = 1
}

const spread = (k) => 10 * ((k * 0.618034) % 1) - 5  // so that particles at one place do not hide each other

function particles(pen, cell, scene, paths, bright, y) {
  const x = paths.at(scene.t)
  pen.globalAlpha = scene.stale ? 0.4 : 1
  for (let k = 0; k < paths.count; k++) dot(pen, cell.X(x[k]), y + spread(k), paths.copies[k], bright, 2.3)
  pen.globalAlpha = 1
}

// Between two brackets lies a boundary region.
function places(pen, cell, map, y, colour) {
  pen.strokeStyle = colour
  pen.lineWidth = 2
  for (const line of map.lines) {
    pen.beginPath()
    pen.moveTo(cell.X(line.x[0]), y - 9)
    pen.lineTo(cell.X(line.x[0]), y + 9)
    pen.stroke()
  }
}

function row(pen, cell, { shape, data }, y, colour) {
  const n = shape[1]
  for (let k = 0; k < n; k++) arrow(pen, cell.X(data[k]), y, cell.X(data[2 * n + k]), y, colour, 1.6)
}

function drawLaws(pen, cell, scene, part) {
  const { result, layers } = scene, box = cell.law
  if (!result || result.d !== 1) return
  const { arrays, scale } = result
  pen.globalAlpha = scene.stale ? 0.35 : 1
  if (layers.has("members") && arrays.members && part.who === "law") {
    const [count, bins] = arrays.members.shape
    for (let k = 0; k < count; k++) lawLine(pen, box, arrays.members.data.subarray(k * bins, (k + 1) * bins), scale, ink("members"), 1)
  }
  if (layers.has("law") && part.law) {
    lawArea(pen, box, part.law.data, result.points, scale)
    if (part.who === "law" && arrays.band) lawBand(pen, box, part.law.data, arrays.band.data, scale, ink("law"))
    lawLine(pen, box, part.law.data, scale, ink(part.who.startsWith("member") ? "learned" : "law"), 1.8)
  }
  if (layers.has("exact") && part.who !== "exact" && arrays.exact) lawLine(pen, box, arrays.exact.data, scale, ink("ink"), 1.2, [4, 3])
  pen.globalAlpha = 1
}
