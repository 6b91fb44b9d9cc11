// One cell in the plane: the map at time t with arrows, boundaries and particles, or a law; and the training points.
import { planeAxes, title } from "./axes.js"
import { ink } from "./colours.js"
import { lawPicture } from "./laws.js"
import { arrow, dot, trainingPoints } from "./marks.js"

export function drawPlane(pen, cell, scene, part) {
  const { box } = cell, outcome = scene.view.stage === "outcome"
  if (part.title) title(pen, cell, part.title)
  planeAxes(pen, cell)
  pen.save()
  pen.beginPath()
  pen.rect(box.x, box.y, box.w, box.h)
  pen.clip()
  pen.fillStyle = ink("ground")
  pen.fillRect(box.x, box.y, box.w, box.h)
  if (outcome) drawLaw(pen, cell, scene, part)
  else drawField(pen, cell, scene, part)
  pen.restore()
  pen.strokeStyle = ink("line")
  pen.lineWidth = 1
  pen.strokeRect(box.x + 0.5, box.y + 0.5, box.w - 1, box.h - 1)
  trainingPoints(pen, cell, scene, outcome)
}

function drawLaw(pen, { box }, scene, part) {
  const { result } = scene
  if (!part.law) return
  pen.globalAlpha = scene.stale ? 0.4 : 1
  pen.imageSmoothingEnabled = true
  pen.drawImage(lawPicture(part.law, result.points, result.scale), box.x, box.y, box.w, box.h)
  pen.globalAlpha = 1
}

function drawField(pen, cell, scene, part) {
  const { box } = cell, { map, layers } = scene
  if (map?.sheet) {
    pen.imageSmoothingEnabled = true
    pen.drawImage(map.sheet, box.x, box.y, box.w, box.h)
  }
  const bright = map?.sheet ? "#ffffff" : ink("ink")
  if (layers.has("boundaries") && map) boundaries(pen, cell, map, bright)
  if (layers.has("arrows") && map) {
    if (map.exactArrows) arrows(pen, cell, map.exactArrows, bright, 0.35)
    if (map.arrows) arrows(pen, cell, map.arrows, map.exactArrows ? ink("arrow") : bright, 0.95)
  }
  if (layers.has("particles") && part.paths) particles(pen, cell, scene, part.paths, bright)
}

function boundaries(pen, cell, map, colour) {
  pen.save()
  pen.strokeStyle = colour
  pen.globalAlpha = 0.8
  pen.lineWidth = 1.2
  for (const line of map.lines) {
    pen.beginPath()
    for (let k = 0; k < line.x.length; k++) pen.lineTo(cell.X(line.x[k]), cell.Y(line.y[k]))
    pen.stroke()
  }
  pen.restore()
}

function arrows(pen, cell, { shape, data }, colour, alpha) {
  const n = shape[1]
  pen.save()
  pen.globalAlpha = alpha
  for (let k = 0; k < n; k++) arrow(pen, cell.X(data[k]), cell.Y(data[n + k]), cell.X(data[2 * n + k]), cell.Y(data[3 * n + k]), colour, 1.3)
  pen.restore()
}

function particles(pen, cell, scene, paths, bright) {
  const x = paths.at(scene.t)
  pen.globalAlpha = scene.stale ? 0.4 : 1
  for (let k = 0; k < paths.count; k++) dot(pen, cell.X(x[2 * k]), cell.Y(x[2 * k + 1]), paths.copies[k], bright)
  pen.globalAlpha = 1
}
