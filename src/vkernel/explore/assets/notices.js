// Sentences for the user: notices that fade, the banner of a lost connection, and hints at controls.
import { clamp } from "./axes.js"
import { all, at } from "./dom.js"

const FADE = 9000, PAUSE = 350

let fading = 0
export function notice(text) {
  clearTimeout(fading)
  at("notice-text").textContent = text
  at("notice").hidden = !text
  fading = setTimeout(() => { at("notice").hidden = true }, FADE)
}

export function banner(text) {
  at("banner").textContent = text
  at("banner").hidden = !text
}

let pause = 0
export const hideHint = () => { clearTimeout(pause); at("tip").hidden = true }

function hint(item) {
  const tip = at("tip"), box = item.getBoundingClientRect(), text = item.dataset.tip
  if (!text) return
  tip.textContent = text
  tip.hidden = false
  const beside = item.closest(".left") && window.innerWidth > 860
  tip.style.left = `${clamp(beside ? box.right + 10 : box.left, 8, window.innerWidth - tip.offsetWidth - 8)}px`
  const below = box.bottom + 8 + tip.offsetHeight < window.innerHeight
  tip.style.top = `${clamp(beside ? box.top : below ? box.bottom + 8 : box.top - 8 - tip.offsetHeight, 8, window.innerHeight - tip.offsetHeight - 8)}px`
}

// Hints appear under the pointer and at keyboard focus, not at a tap.
export function addHints(root = document) {
  for (const item of all("[data-tip]", root)) {
    item.addEventListener("pointerenter", (e) => { if (e.pointerType === "touch") return; clearTimeout(pause); pause = setTimeout(() => hint(item), PAUSE) })
    item.addEventListener("pointerleave", hideHint)
    item.addEventListener("focusin", (e) => { if (e.target.matches(":focus-visible")) hint(item) })
    item.addEventListener("focusout", hideHint)
    item.addEventListener("click", hideHint)
  }
}

export function startNotices() {
  at("notice-close").onclick = () => { at("notice").hidden = true }
  window.addEventListener("scroll", hideHint, true)
}
