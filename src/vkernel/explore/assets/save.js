// What leaves the page: link, script, JSON, CSV, and a picture with legends and caption.
import { label } from "./axes.js"
import { ink } from "./colours.js"
import { at } from "./dom.js"
import { drawLegend, items } from "./legend.js"
import { drawScene, layout } from "./stage.js"

export async function copy(text) {
  try { await navigator.clipboard.writeText(text) } catch {  // without permission, or without https
    const area = document.createElement("textarea")
    area.value = text
    document.body.append(area)
    area.select()
    document.execCommand("copy")
    area.remove()
  }
}

export function download(blob, name) {
  const a = document.createElement("a")
  a.href = URL.createObjectURL(blob)
  a.download = name
  a.click()
  setTimeout(() => URL.revokeObjectURL(a.href), 5000)
}

const PAD = 24, LINE = 20

// Words broken into lines of a width.
function lines(pen, text, width) {
  const found = [""]
  for (const word of text.split(" ")) {
    const longer = found.at(-1) ? `${found.at(-1)} ${word}` : word
    if (pen.measureText(longer).width > width) found.push(word)
    else found[found.length - 1] = longer
  }
  return found
}

// The picture at twice the size of the screen, tiles of laws beside it, legends and captions below.
export function savePicture(scene, captions, tiles, name) {
  const frame = at("frame"), width = frame.clientWidth, height = frame.clientHeight, scale = 2
  const sheet = document.createElement("canvas"), pen = sheet.getContext("2d"), found = items(scene)
  pen.font = "13px system-ui"
  const side = tiles.length ? 190 : 0, inner = width + (side ? side + PAD : 0)
  const texts = captions.flatMap((text) => lines(pen, text, inner - 20)), legend = drawLegend(pen, 0, 0, inner, found, true)
  const whole = PAD + height + 12 + legend + 10 + LINE * texts.length + PAD
  Object.assign(sheet, { width: scale * (inner + 2 * PAD), height: scale * whole })
  pen.setTransform(scale, 0, 0, scale, 0, 0)
  pen.fillStyle = ink("paper")
  pen.fillRect(0, 0, inner + 2 * PAD, whole)
  pen.translate(PAD, PAD)
  drawScene(pen, layout(scene, width, height), scene)
  if (side) drawTiles(pen, tiles, width + PAD, side, height)
  drawLegend(pen, 4, height + 12, inner, found)
  texts.forEach((text, k) => label(pen, text, 4, height + 12 + legend + 16 + LINE * k, "left", "middle", k ? 13 : 15, ink(k ? "soft" : "ink"), k ? 400 : 650))
  return new Promise((done) => sheet.toBlob((blob) => { download(blob, name); done() }, "image/png"))
}

function drawTiles(pen, tiles, x, width, height) {
  let y = 8
  for (const tile of tiles) {
    const canvas = tile.querySelector("canvas"), h = Math.min(width * canvas.height / canvas.width, 110), w = h * canvas.width / canvas.height
    if (y + h + 22 > height) break
    pen.drawImage(canvas, x, y, w, h)
    label(pen, tile.textContent, x, y + h + 9, "left", "middle", 11.5)
    y += h + 22
  }
}
