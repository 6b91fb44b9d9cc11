// Maps from the answers of the server: a picture of values, and polygons.
import { picture, ramps } from "./colours.js"

const ROWS = 140, COLUMNS = 401

// In the plane values are cells. On the line the picture has places and times, even in log t from noise to data.
export function mapPicture(arrays, scale, answer) {
  if (!scale || answer.map === "none") return null
  if (arrays.field) return picture(evenRows(arrays.field, arrays.field_t.data, answer.range), ROWS, arrays.field.shape[1], scale, ramps.map, true)
  if (!arrays.values?.data.length) return null
  if (arrays.values.shape.length === 1) return picture(evenColumns(arrays.values.data, arrays.x.data), 1, COLUMNS, scale, ramps.map)
  return picture(arrays.values.data, ...arrays.values.shape, scale, ramps.map)
}

// On the line C grows without bound as t falls, so the scale of all times has three decades and says that it ends.
export function shownScale(scale, d) {
  const most = Number((1e3 * scale?.low).toPrecision(6))
  return d === 1 && scale?.log && scale.high > most ? { ...scale, high: most, open: true } : scale
}

// Rows at even places of log t, between those of the answer.
function evenRows({ shape: [rows, columns], data }, times, [eps, T]) {
  const found = new Float32Array(ROWS * columns)
  let k = 0
  for (let r = 0; r < ROWS; r++) {
    const t = T * (eps / T) ** ((r + 0.5) / ROWS)
    while (k < rows - 2 && times[k + 1] > t) k++
    const f = Math.min(Math.max(Math.log(times[k] / t) / Math.log(times[k] / times[k + 1]), 0), 1)
    for (let c = 0; c < columns; c++) found[r * columns + c] = (1 - f) * data[k * columns + c] + f * data[(k + 1) * columns + c]
  }
  return found
}

// A curve over uneven places, at even ones.
function evenColumns(values, x) {
  const found = new Float32Array(COLUMNS)
  let k = 0
  for (let c = 0; c < COLUMNS; c++) {
    const place = -2 + (4 * (c + 0.5)) / COLUMNS
    while (k < x.length - 2 && x[k + 1] < place) k++
    const f = Math.min(Math.max((place - x[k]) / (x[k + 1] - x[k] || 1), 0), 1)
    found[c] = (1 - f) * values[k] + f * values[k + 1]
  }
  return found
}

// Polygons lie back to back in one array (2, n).
export function polygons(lines, sizes) {
  if (!lines) return []
  const n = lines.shape[1]
  let k = 0
  return sizes.map((size) => {
    const found = { x: lines.data.subarray(k, k + size), y: lines.data.subarray(n + k, n + k + size) }
    k += size
    return found
  })
}
