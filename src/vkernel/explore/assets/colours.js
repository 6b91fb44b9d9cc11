// Colour scales. Maps are viridis, laws blue (copies) and orange (new): the two are never mixed up.
const VIRIDIS = ["#440154", "#482878", "#3e4989", "#31688e", "#26828e", "#1f9e89", "#35b779", "#6ece58", "#b5de2b", "#fde725"]
const LAWS = {
  light: { copied: ["#ffffff", "#c6def0", "#62a8d6", "#0072b2", "#043a5e"], fresh: ["#ffffff", "#f9d5bb", "#ef9a5b", "#d55e00", "#7a3300"] },
  dark: { copied: ["#171b21", "#1b3d55", "#2a76a8", "#56b4e9", "#e3f4ff"], fresh: ["#171b21", "#553118", "#a85a1d", "#f28e3c", "#ffeedd"] },
}

const rgb = (hex) => [1, 3, 5].map((k) => parseInt(hex.slice(k, k + 2), 16))

// 256 colours, as bytes, evenly between the given ones.
function table(stops) {
  const found = new Uint8ClampedArray(256 * 3), last = stops.length - 1
  for (let k = 0; k < 256; k++) {
    const place = (k / 255) * last, low = Math.min(Math.floor(place), last - 1), f = place - low
    const a = rgb(stops[low]), b = rgb(stops[low + 1])
    for (let c = 0; c < 3; c++) found[3 * k + c] = a[c] + f * (b[c] - a[c])
  }
  return found
}

export const ramps = {
  map: table(VIRIDIS),
  light: { copied: table(LAWS.light.copied), fresh: table(LAWS.light.fresh) },
  dark: { copied: table(LAWS.dark.copied), fresh: table(LAWS.dark.fresh) },
}

export const isDark = () => document.documentElement.dataset.theme === "dark"
export const lawRamps = () => ramps[isDark() ? "dark" : "light"]

// A colour of the style sheet; looked up once for each theme, since every particle needs it in every frame.
const inks = new Map()
export function ink(name) {
  const key = `${isDark()} ${name}`
  if (!inks.has(key)) inks.set(key, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim())
  return inks.get(key)
}

// Places of values on a scale, in [0, 1]: logarithmic, linear, or by a power, which shows thin mass beside peaks.
export function onScale(scale) {
  const { low, high } = scale
  if (scale.log) {
    const start = Math.log(low), span = Math.log(high) - start || 1
    return (v) => (v > 0 ? Math.min(Math.max((Math.log(v) - start) / span, 0), 1) : 0)
  }
  if (scale.power) return (v) => Math.min((Math.max(v, 0) / high) ** scale.power, 1)
  return (v) => Math.min(Math.max((v - low) / (high - low || 1), 0), 1)
}

// Numbers that label a scale: decades, or a few round values.
export function ticks(scale) {
  const { low, high } = scale
  if (!scale.log) return scale.power ? [0, ...[0.3, 0.65, 1].map((u) => round(high * u ** (1 / scale.power)))] : [low, (low + high) / 2, high]
  const decades = []
  for (let k = Math.ceil(Math.log10(low) - 1e-6); k <= Math.log10(high) + 1e-6; k++) decades.push(Number(`1e${k}`))
  const every = Math.ceil(decades.length / 5)
  return decades.filter((_, k) => (decades.length - 1 - k) % every === 0)
}

function round(v) {
  if (!(v > 0)) return 0
  const unit = 10 ** Math.floor(Math.log10(v))
  return Math.round(v / unit) * unit
}

export function number(v) {
  if (v === 0) return "0"
  const size = Math.abs(v)
  if (size >= 1e4 || size < 1e-3) return v.toExponential(0).replace("e-", "e−").replace("e+", "e")
  return String(Number(v.toPrecision(2))).replace(/^(-?)0\./, "$1.").replace("-", "−")
}

// A picture of rows of values; row zero is the bottom one unless `down`.
export function picture(values, rows, columns, scale, ramp, down = false) {
  const sheet = document.createElement("canvas")
  sheet.width = columns
  sheet.height = rows
  const pen = sheet.getContext("2d"), image = pen.createImageData(columns, rows), place = onScale(scale)
  for (let r = 0; r < rows; r++) {
    const to = (down ? r : rows - 1 - r) * columns
    for (let c = 0; c < columns; c++) {
      const k = 3 * Math.round(255 * place(values[r * columns + c])), at = 4 * (to + c)
      const from = typeof ramp === "function" ? ramp(c, r) : ramp
      image.data[at] = from[k]
      image.data[at + 1] = from[k + 1]
      image.data[at + 2] = from[k + 2]
      image.data[at + 3] = 255
    }
  }
  pen.putImageData(image, 0, 0)
  return sheet
}
