// The time: a slider that is even in log t, from noise (left) to data (right), and the clock that plays particles.
import { clamp } from "./axes.js"

const SECONDS = 7

export const placeOf = (t, [eps, T]) => Math.log(T / clamp(t, eps, T)) / (Math.log(T / eps) || 1)
export const timeAt = (u, [eps, T]) => (u <= 0 ? T : u >= 1 ? eps : T * Math.exp(-u * Math.log(T / eps)))

// `page` offers store, range(), visible() (the largest time at which particles are seen) and started(t).
export class Clock {
  constructor(slider, button, output, page) {
    Object.assign(this, { slider, button, output, page, playing: 0, shown: null, paused: null })
    slider.oninput = () => { this.stop(); page.store.preview({ t: this.read(timeAt(slider.value / 1000, page.range())) }) }
    slider.onchange = () => page.store.release()
    button.onclick = () => (this.playing ? this.pause() : this.play())
  }

  read(t) { return Number(t.toPrecision(4)) }

  // Shows the time of the state; while playing the clock is ahead of it.
  show() {
    const t = this.page.store.state.t, range = this.page.range()
    if (document.activeElement !== this.slider || this.playing || this.shown !== t) this.slider.value = Math.round(1000 * placeOf(t, range))
    this.shown = t
    const text = `t = ${Number(t.toPrecision(3))}`
    this.output.textContent = text
    this.slider.setAttribute("aria-valuetext", text)
  }

  // Plays from visible noise, or on from where it was paused.
  play(from = null) {
    const { store } = this.page, resumed = from === null && this.paused === store.state.t
    const start = resumed ? this.paused : from ?? this.page.visible()
    let place = placeOf(start, this.page.range())
    if (!resumed) this.page.started(start)
    store.hold()
    this.button.classList.add("playing")
    this.button.setAttribute("aria-label", "Pause")
    let before = performance.now()
    const tick = (now) => {
      place = Math.min(place + Math.max(now - before, 0) / (1000 * SECONDS), 1)
      before = now
      store.preview({ t: this.read(timeAt(place, this.page.range())) })
      if (place >= 1) this.pause()
      else this.playing = requestAnimationFrame(tick)
    }
    this.playing = requestAnimationFrame(tick)
  }

  stop() {
    cancelAnimationFrame(this.playing)
    this.playing = 0
    this.button.classList.remove("playing")
    this.button.setAttribute("aria-label", "Play")
  }

  pause() {
    if (!this.playing) return
    this.stop()
    const { t } = this.page.store.state
    this.paused = t > this.page.range()[0] ? t : null  // at the end there is nothing to resume
    this.page.store.release()
  }
}
