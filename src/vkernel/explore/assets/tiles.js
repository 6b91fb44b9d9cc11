// Small multiples: the laws of a run as tiles of one size. A press shows a law on the large canvas.
import { ink } from "./colours.js"
import { at, make } from "./dom.js"
import { lawArea, lawLine, lawPicture } from "./laws.js"

// The laws of a result, by name: the average, its twin without target noise, the exact score, single models.
export function lawsOf(result) {
  if (!result) return []
  const { arrays, names = {} } = result, exact = result.state.sampler === "exact"
  const gaps = arrays.member_gaps?.data, named = (k) => `model ${k + 1}${gaps ? `: ${Math.round(100 * gaps[k])} % new` : ""}`
  const found = [{ who: "law", name: names.law ?? (exact ? "exact score" : "average"), law: arrays.law }]
  if (arrays.twin_law) found.push({ who: "twin", name: names.twin ?? "exact targets", law: arrays.twin_law })
  if (arrays.exact && !exact) found.push({ who: "exact", name: names.exact ?? "exact score", law: arrays.exact })
  const members = arrays.members, bins = members ? members.shape.slice(1) : [], size = bins.reduce((a, b) => a * b, 1)
  for (let k = 0; k < (members?.shape[0] ?? 0); k++) {
    found.push({ who: `member ${k}`, name: named(k), law: { shape: bins, data: members.data.subarray(k * size, (k + 1) * size) } })
  }
  for (const { k, law } of result.extra) found.push({ who: `member ${k}`, name: named(k), law })
  return found
}

export class Tiles {
  constructor(show) { this.show = show; this.key = null }

  draw(result, laws, shown, dark) {
    const key = [result?.id, laws.length, dark].join()
    if (key !== this.key) {
      this.key = key
      at("tiles").dataset.d = result?.d ?? 1
      at("tiles").replaceChildren(...laws.map((item) => this.tile(result, item)))
    }
    for (const tile of at("tiles").children) tile.setAttribute("aria-pressed", tile.dataset.who === shown)
  }

  tile(result, { who, name, law }) {
    const canvas = make("canvas", { width: 180, height: result.d === 2 ? 180 : 100 }), pen = canvas.getContext("2d")
    pen.fillStyle = ink("ground")
    pen.fillRect(0, 0, canvas.width, canvas.height)
    if (result.d === 2) {
      pen.drawImage(lawPicture(law, result.points, result.scale), 0, 0, 180, 180)
      pen.strokeStyle = ink("soft")
      if (result.points.length <= 60) for (const [x, y] of result.points) { pen.beginPath(); pen.arc(45 * (x + 2), 45 * (2 - y), 5, 0, 7); pen.stroke() }
    } else {
      const box = { x: 0, y: 6, w: 180, h: 92 }
      lawArea(pen, box, law.data, result.points, result.scale)
      lawLine(pen, box, law.data, result.scale, ink(who.startsWith("member") ? "learned" : "law"), 2)
    }
    return make("button", { className: "tile", dataset: { who }, onclick: () => this.show(who) }, canvas, make("span", { textContent: name }))
  }
}
