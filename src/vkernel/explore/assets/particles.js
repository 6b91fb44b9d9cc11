// Particles on their paths. Frames are positions (S + 1, N, d) at decreasing times; between two frames paths are straight
// in log t.
import { WINDOW } from "./axes.js"
import { distinct, isCopy } from "./copies.js"

export class Paths {
  constructor(times, frames, points) {
    const [, count, d] = frames.shape
    Object.assign(this, { times, frames: frames.data, count, d })
    const last = (times.length - 1) * count * d, known = distinct(points)
    this.copies = Array.from({ length: count }, (_, k) => {
      const at = last + k * d
      return isCopy(known, this.frames[at], d === 2 ? this.frames[at + 1] : 0)
    })
  }

  // The frame before time t and how far t lies towards the next one.
  between(t) {
    const times = this.times
    let k = 0
    while (k < times.length - 2 && times[k + 1] >= t) k++
    const f = Math.log(times[k] / t) / (Math.log(times[k] / times[k + 1]) || 1)
    return [k, Math.min(Math.max(f, 0), 1)]
  }

  at(t) {
    const [k, f] = this.between(t), size = this.count * this.d, found = new Float32Array(size)
    for (let i = 0; i < size; i++) found[i] = (1 - f) * this.frames[k * size + i] + f * this.frames[(k + 1) * size + i]
    return found
  }

  // The largest time at which nine of ten particles are in the window: before it there is nothing to see.
  visible() {
    const size = this.count * this.d
    for (let k = 0; k < this.times.length; k++) {
      let inside = 0
      for (let i = 0; i < this.count; i++) {
        let all = true
        for (let c = 0; c < this.d; c++) all &&= Math.abs(this.frames[k * size + i * this.d + c]) <= WINDOW
        inside += all
      }
      if (inside >= 0.9 * this.count) return this.times[k]
    }
    return this.times[0]
  }
}
