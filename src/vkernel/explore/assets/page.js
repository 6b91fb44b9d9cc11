// The controls of the page: actions of the user are sent to the server as messages, and its answers are shown. Nothing
// is computed here but the position of particles between two frames.
export function render({ model }) {
  const at = (id) => document.getElementById(id)
  const all = (query) => [...document.querySelectorAll(query)]
  const app = at("app")
  const send = (kind, rest = {}) => model.send_msg({ kind, ...rest })
  const clamp = (v, low, high) => Math.min(Math.max(v, low), high)
  let state = null, range = [0.001, 1], step = -1, selected = 0, query = ""

  const steps = JSON.parse(at("stops").textContent)
  const options = Object.fromEntries(all("[data-field]").map((c) => [c.dataset.field, JSON.parse(c.dataset.options)]))

  // Previews of a drag: one request at a time; while it is pending only the latest next one is kept
  let waiting = null, since = 0
  const preview = (change) => {
    if (since && performance.now() - since < 3000) { waiting = change; return }
    since = performance.now()
    send("preview", change)
  }
  const ready = ({ of }) => {
    if (of === "edit") { editing = false; next() }
    if (of !== "preview") return
    since = 0
    if (waiting) { const change = waiting; waiting = null; preview(change) }
  }

  const find = (name) => {
    for (const doc of window.Bokeh.documents) {
      const found = doc.get_model_by_name(name)
      if (found) return found
    }
    return null
  }

  // Particles
  const points = find("points"), frames = find("frames"), moving = find("moving")
  let paths = null, playing = 0, place = 0
  const between = (u) => {
    const places = paths.places
    let k = 0
    while (k < places.length - 2 && places[k + 1] <= u) k++
    return [k, clamp((u - places[k]) / Math.max(places[k + 1] - places[k], 1e-9), 0, 1)]
  }
  const timeAt = (u) => {
    if (!paths) return Math.exp(Math.log(range[1]) + u * (Math.log(range[0]) - Math.log(range[1])))
    const [k, f] = between(u)
    return Math.exp((1 - f) * Math.log(paths.times[k]) + f * Math.log(paths.times[k + 1]))
  }
  const placeOf = (t) => {
    let low = 0, high = 1
    for (let k = 0; k < 40; k++) { const u = (low + high) / 2; if (timeAt(u) > t) low = u; else high = u }
    return (low + high) / 2
  }
  const drawParticles = () => {
    const whole = paths && frames.data.x.length === paths.count * paths.times.length  // data and message come apart
    if (!whole || !state || paths.d !== state.d || !state.layers.includes("particles")) {
      if (moving.data.x.length) moving.setv({ data: { x: [], y: [] } }, { sync: false })
      return
    }
    const [k, f] = between(place), n = paths.count, X = frames.data.x, Y = frames.data.y
    const x = new Float32Array(n), y = new Float32Array(n)
    for (let i = 0; i < n; i++) {
      x[i] = (1 - f) * X[k * n + i] + f * X[(k + 1) * n + i]
      y[i] = (1 - f) * Y[k * n + i] + f * Y[(k + 1) * n + i]
    }
    moving.setv({ data: { x, y } }, { sync: false })
  }
  frames.connect(frames.properties.data.change, drawParticles)
  const showTime = (t) => {
    at("time-value").textContent = `t = ${Number(t.toPrecision(3))}`
    at("time").setAttribute("aria-valuetext", at("time-value").textContent)
  }
  const goTo = (u, notify = true) => {
    place = clamp(u, 0, 1)
    at("time").value = Math.round(1000 * place)
    const t = clamp(timeAt(place), range[0], range[1])
    showTime(t)
    drawParticles()
    if (notify) preview({ t })
    return t
  }
  const stop = () => {
    cancelAnimationFrame(playing)
    playing = 0
    at("play").classList.remove("playing")
    at("play").setAttribute("aria-label", "Play")
  }
  const settle = () => { waiting = null; send("set", { t: clamp(timeAt(place), range[0], range[1]) }) }
  at("play").onclick = () => {
    if (playing) { stop(); settle(); return }
    at("play").classList.add("playing")
    at("play").setAttribute("aria-label", "Pause")
    if (place > 0.999) place = 0
    let before = performance.now()
    const tick = (now) => {
      const next = place + (now - before) / 7000
      before = now
      goTo(next)
      if (next >= 1) { stop(); settle() } else playing = requestAnimationFrame(tick)
    }
    playing = requestAnimationFrame(tick)
  }
  at("time").oninput = (e) => { if (playing) stop(); goTo(e.target.value / 1000) }
  at("time").onchange = () => settle()

  // Points
  let held = false
  for (const id of ["plane", "line"]) at(id).addEventListener("pointerdown", () => { held = true }, true)
  window.addEventListener("pointerup", () => { held = false; waiting = null })
  points.connect(points.change, () => {
    if (!held) return
    preview({ x: Array.from(points.get_array("x")), y: Array.from(points.get_array("y")) })
  })
  points.selected.connect(points.selected.properties.indices.change, () => {
    const [first] = points.selected.indices
    if (first !== undefined) { selected = first; showPoint() }
  })
  const showPoint = () => {
    if (!state) return
    const n = state.points.length
    selected = clamp(selected, 0, n - 1)
    const point = state.points[selected]
    at("point-name").textContent = `point ${selected + 1} of ${n}`
    const fill = (id, v) => { if (document.activeElement !== at(id)) at(id).value = v }
    fill("point-x", point[0]); fill("point-y", point[1] ?? 0); fill("point-w", state.weights[selected])
    at("point-y-label").hidden = state.d === 1
    at("point-remove").disabled = n < 2
  }
  const pick = (by) => {
    const n = state.points.length
    selected = (selected + by + n) % n
    points.selected.indices = [selected]
    showPoint()
  }
  // Edits of points and weights are functions of the state; the next one is sent when the server has answered the last
  const edits = []
  let editing = false
  const next = () => {
    if (editing || !edits.length) return
    editing = true
    const [list, weights] = edits.shift()()
    send("edit", { points: list, weights })
  }
  const edit = (change) => { edits.push(change); next() }
  const put = (point, weight) => {
    const k = selected, at = (list, item) => list.map((old, i) => (i === k ? item : old))
    edit(() => [at(state.points, point.slice(0, state.d)), at(state.weights, weight)])
  }
  const free = () => {  // the first place of a low-discrepancy sequence that no point has
    for (let k = 0; ; k++) {
      const spot = [0.618034, 0.754878].slice(0, state.d).map((r) => Number((limit * (2 * ((0.5 + k * r) % 1) - 1)).toFixed(3)))
      if (!state.points.some((point) => point.every((v, i) => v === spot[i]))) return spot
    }
  }
  // Arrow keys move a point like a drag: previewed at each key, committed soon after the last one
  let moved = null, soon = 0
  const limit = Number(at("point-x").max)
  const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowDown: [0, -1], ArrowUp: [0, 1] }
  const keep = () => {
    clearTimeout(soon)
    if (!moved) return
    const [x, y] = moved
    state.points[selected] = moved.slice(0, state.d)
    put(moved, state.weights[selected])
    moved = waiting = null
    at("point-where").textContent = `point ${selected + 1} at ${state.d === 2 ? `${x}, ${y}` : x}`
  }
  for (const id of ["plane", "line"]) {
    at(id).addEventListener("keydown", (e) => {
      const move = moves[e.key], turn = { PageUp: -1, PageDown: 1 }[e.key]
      if (!state || !(move || turn || e.key === "Insert" || e.key === "Delete")) return
      e.preventDefault()
      if (!move) keep()
      if (turn) pick(turn)
      else if (e.key === "Insert") at("point-add").click()
      else if (e.key === "Delete") at("point-remove").click()
      else {
        clearTimeout(soon)
        const far = e.shiftKey ? 0.2 : 0.05, [x, y = 0] = moved ?? state.points[selected]
        const to = (v) => Number(clamp(v, -limit, limit).toFixed(3))
        moved = [to(x + far * move[0]), state.d === 2 ? to(y + far * move[1]) : 0]
        points.data.x[selected] = moved[0]
        points.data.y[selected] = moved[1]
        points.selected.indices = [selected]
        points.change.emit()
        preview({ x: Array.from(points.get_array("x")), y: Array.from(points.get_array("y")) })
      }
    })
    at(id).addEventListener("keyup", (e) => { if (moves[e.key]) { clearTimeout(soon); soon = setTimeout(keep, 250) } })
    at(id).addEventListener("focusout", keep)
  }
  at("point-before").onclick = () => pick(-1)
  at("point-after").onclick = () => pick(1)
  for (const id of ["point-x", "point-y", "point-w"]) at(id).onchange = () => {
    const [x, y, weight] = ["point-x", "point-y", "point-w"].map((name) => at(name).valueAsNumber)
    if ([x, weight].some(Number.isNaN) || (state.d === 2 && Number.isNaN(y))) { notice("A coordinate must be a number between -2 and 2."); return }
    put([x, y], weight)
  }
  at("point-add").onclick = () => edit(() => { selected = state.points.length; return [[...state.points, free()], [...state.weights, 1]] })
  at("point-remove").onclick = () => edit(() => [state.points, state.weights].map((list) => list.filter((_, k) => k !== selected)))
  const presets = Object.fromEntries([...at("preset").options].slice(1).map((o) => [o.value, JSON.parse(o.dataset.points)]))
  const presetOf = (list) => Object.keys(presets).find((name) => JSON.stringify(presets[name]) === JSON.stringify(list)) ?? ""
  at("preset").onchange = (e) => {
    const list = presets[e.target.value]
    if (list) { selected = 0; edit(() => [list, list.map(() => 1)]) }
  }
  at("csv").onclick = () => at("csv-file").click()
  at("csv-file").onchange = async (e) => {
    const [file] = e.target.files
    if (!file) return
    if (file.size > Number(e.target.dataset.most)) notice(`This file has ${(file.size / 1e6).toFixed(1)} MB; the page takes up to 1 MB.`)
    else send("csv", { text: await file.text() })
    e.target.value = ""
  }

  // Controls and layers
  // The layers that a sampler has; the layer "law" of a trained model adds its single members, and one of the two maps stays
  const layersFor = (sampler) => {
    const has = (b) => !b.dataset.samplers || b.dataset.samplers.split(" ").includes(sampler)
    const available = all("[data-layer]").filter(has).map((b) => b.dataset.layer), wanted = new Set(state.layers)
    if (wanted.has("law")) wanted.add("members")
    if (wanted.has("variance") && !available.includes("variance")) wanted.add("noise")
    return available.filter((name) => wanted.has(name))
  }
  for (const control of all("[data-field]")) {
    const name = control.dataset.field
    const choose = (index) => {
      const value = options[name][index]
      send("set", name === "sampler" ? { sampler: value, layers: layersFor(value) } : { [name]: value })
    }
    if (control.classList.contains("pair")) for (const b of control.children) b.onclick = () => choose(Number(b.dataset.index))
    else {
      control.onchange = () => choose(Number(control.value))
      if (control.type === "range") control.oninput = () => { at(`value-${name}`).textContent = control.dataset.captions.split("|")[control.value] }
    }
  }
  for (const b of all("[data-layer]")) b.onclick = () => {
    const name = b.dataset.layer, on = !state.layers.includes(name)
    const rivals = { noise: "variance", variance: "noise" }
    let layers = state.layers.filter((other) => other !== name && !(on && state.d === 2 && other === rivals[name]))
    if (on) layers = [...layers, name]
    send("set", { layers })
  }
  const nearest = (name, value) => {
    const number = (v) => (v === "inf" ? 1e9 : Number(v))
    const list = options[name] ?? []
    const same = list.findIndex((v) => v === value)
    if (same >= 0 || typeof list[0] === "string") return Math.max(same, 0)
    let best = 0
    list.forEach((v, k) => { if (Math.abs(number(v) - number(value)) < Math.abs(number(list[best]) - number(value))) best = k })
    return best
  }
  const showControls = () => {
    for (const control of all("[data-field]")) {
      const name = control.dataset.field, index = nearest(name, state[name])
      if (control.classList.contains("pair")) [...control.children].forEach((b, k) => b.setAttribute("aria-pressed", k === index))
      else {
        control.value = index
        if (control.type === "range") {
          const exact = options[name]?.[index] === state[name], caption = control.dataset.captions.split("|")[index]
          at(`value-${name}`).textContent = exact ? caption : String(state[name])
          control.setAttribute("aria-valuetext", at(`value-${name}`).textContent)
        }
      }
    }
    for (const item of all("[data-samplers]")) {
      item.hidden = item.dataset.samplers !== "" && !item.dataset.samplers.split(" ").includes(state.sampler)
    }
    for (const b of all("[data-layer]")) b.setAttribute("aria-pressed", state.layers.includes(b.dataset.layer))
    const map = state.layers.includes("variance") ? "disagreement of the models" : "share of the target that is noise"
    at("legend-name").textContent = map
    at("legend").classList.toggle("off", !state.layers.includes("noise") && !state.layers.includes("variance"))
    for (const key of ["law", "exact", "noise", "variance"]) at("keys").querySelector(`.${key}`).hidden = !state.layers.includes(key)
    at("keys").querySelector(".dots").hidden = !state.layers.includes("noise")
    const shown = ["law", "exact"].filter((name) => state.layers.includes(name)).length
    at("laws").classList.toggle("flat", shown === 2 && state.sampler !== "exact" && !state.layers.includes("members"))
    at("laws").style.visibility = shown || state.layers.includes("members") ? "visible" : "hidden"
  }
  const showPanel = (panel) => {
    at("panel-caption").textContent = panel.caption
    at("panel-number").textContent = panel.number
    at("panel-text").replaceChildren(...panel.sentences.map((sentence) => {
      const p = document.createElement("p")
      p.textContent = sentence
      return p
    }))
  }

  // Header
  const theme = (dark) => {
    document.documentElement.dataset.theme = dark ? "dark" : "light"
    at("theme").setAttribute("aria-pressed", dark)
  }
  at("theme").onclick = () => { theme(!state.dark); send("set", { dark: !state.dark }) }
  const copy = async (text, message) => {
    try { await navigator.clipboard.writeText(text) } catch {
      const area = document.createElement("textarea")
      area.value = text
      document.body.append(area)
      area.select()
      document.execCommand("copy")
      area.remove()
    }
    notice(message)
  }
  at("link").onclick = () => copy(window.location.href, "The address of this picture is on the clipboard.")
  at("python").onclick = () => send("python")
  at("json").onclick = () => send("json")
  at("code-copy").onclick = () => { copy(at("code-text").textContent, "The script is on the clipboard."); at("code").close() }
  at("code-close").onclick = () => at("code").close()
  const save = (blob, name) => {
    const a = document.createElement("a")
    a.href = URL.createObjectURL(blob)
    a.download = name
    a.click()
    setTimeout(() => URL.revokeObjectURL(a.href), 5000)
  }
  const view = (name) => {
    const model = find(name)
    const search = (v) => {
      if (v.model === model) return v
      for (const child of v.child_views ?? []) { const found = search(child); if (found) return found }
      return null
    }
    for (const root of window.Bokeh.index.roots) { const found = search(root); if (found) return found }
    return null
  }
  at("png").onclick = () => {
    const parts = (state.d === 1 ? ["line"] : ["plane", "laws"]).map((name) => view(`${name} picture`)?.export("png", true).canvas).filter(Boolean)
    const style = getComputedStyle(document.documentElement)
    const scale = window.devicePixelRatio || 1, pad = 18 * scale, foot = 46 * scale
    const sheet = document.createElement("canvas")
    sheet.width = parts.reduce((w, c) => w + c.width + pad, pad)
    sheet.height = Math.max(...parts.map((c) => c.height)) + 2 * pad + foot
    const pen = sheet.getContext("2d")
    pen.fillStyle = style.getPropertyValue("--paper")
    pen.fillRect(0, 0, sheet.width, sheet.height)
    let x = pad
    for (const c of parts) { pen.drawImage(c, x, pad); x += c.width + pad }
    pen.fillStyle = style.getPropertyValue("--ink")
    pen.font = `${15 * scale}px system-ui, sans-serif`
    const old = at("outdated").hidden ? "" : ` · ${at("outdated").textContent}`
    const caption = `gap mass ${at("panel-number").textContent} · ${at("control-sampler").selectedOptions[0].textContent} · ${at("time-value").textContent}${old}`
    pen.fillText(caption, pad, sheet.height - pad - 8 * scale)
    sheet.toBlob((blob) => save(blob, "vkernel-explore.png"), "image/png")
  }

  // Job
  const showJob = ({ busy = false, label = "", share = 0, stale = false }) => {
    app.classList.toggle("busy", busy)
    app.classList.toggle("stale", stale)
    at("job-bar").firstElementChild.style.width = `${Math.round(100 * share)}%`
    at("job-bar").setAttribute("aria-valuenow", Math.round(100 * share))
    at("job-label").textContent = label || (stale ? "" : "samples are up to date")
    at("job-run").disabled = !stale
  }
  at("job-cancel").onclick = () => send("cancel")
  at("job-run").onclick = () => send("run")

  // Tour
  const guide = (k) => {
    step = k
    at("guide").hidden = k < 0
    if (k < 0) return
    at("guide-count").textContent = `${k + 1} of ${steps.length}`
    at("guide-title").textContent = steps[k].title
    at("guide-text").textContent = steps[k].text
    at("guide-back").disabled = k === 0
    at("guide-next").textContent = k === steps.length - 1 ? "Done" : "Next"
    at("guide").parentElement.scrollTop = 0
    selected = 0
    stop()
    send("tour", { step: k })
  }
  at("tour").onclick = () => guide(0)
  at("guide-next").onclick = () => guide(step === steps.length - 1 ? -1 : step + 1)
  at("guide-back").onclick = () => guide(step - 1)
  at("guide-end").onclick = () => guide(-1)

  // Notices and hints
  let fade = 0
  const notice = (text) => {
    clearTimeout(fade)
    at("notice-text").textContent = text
    at("notice").hidden = false
    fade = setTimeout(() => { at("notice").hidden = true }, 9000)
  }
  at("notice-close").onclick = () => { at("notice").hidden = true }
  let pause = 0
  const hint = (item) => {
    const tip = at("tip"), box = item.getBoundingClientRect()
    tip.textContent = item.dataset.tip
    tip.hidden = false
    const beside = item.closest(".left") && window.innerWidth > 860
    tip.style.left = `${clamp(beside ? box.right + 10 : box.left, 8, window.innerWidth - tip.offsetWidth - 8)}px`
    tip.style.top = `${clamp(beside ? box.top : box.bottom + 8, 8, window.innerHeight - tip.offsetHeight - 8)}px`
  }
  const hideHint = () => { clearTimeout(pause); at("tip").hidden = true }
  for (const item of all("[data-tip]")) {
    item.addEventListener("mouseenter", () => { clearTimeout(pause); pause = setTimeout(() => hint(item), 350) })
    item.addEventListener("mouseleave", hideHint)
    item.addEventListener("focusin", (e) => { if (e.target.matches(":focus-visible")) hint(item) })
    item.addEventListener("focusout", hideHint)
    item.addEventListener("click", hideHint)
  }
  window.addEventListener("keydown", (e) => {
    if (e.key === "Escape") hideHint()
    const typing = e.target.matches?.("input, select, textarea, button, summary")
    if (e.key === " " && !typing) { e.preventDefault(); at("play").click() }
  })

  // Messages of the server
  const handlers = {
    state: (m) => {
      state = m.state; range = m.range; query = m.query
      app.dataset.d = state.d
      theme(state.dark)
      window.history.replaceState(null, "", `?${query}`)
      at("preset").value = presetOf(state.points)
      showControls(); showPoint(); showPanel(m.panel)
      if (m.stale) showJob({ busy: app.classList.contains("busy"), label: "", share: 0, stale: true })
      if (!playing) { place = placeOf(state.t); at("time").value = Math.round(1000 * place); showTime(state.t) }
      drawParticles()
      app.dataset.ready = "1"
    },
    frames: (m) => {
      paths = m
      if (!playing && state) { place = placeOf(state.t); at("time").value = Math.round(1000 * place) }
      drawParticles()
    },
    job: showJob,
    marks: (m) => {
      app.classList.toggle("earlier", m.samples)
      at("laws-outdated").hidden = !m.samples || at("laws").style.visibility === "hidden"
      const fresh = "samples are up to date", old = "samples are of an earlier state", label = at("job-label")
      if (!app.classList.contains("busy") && label.textContent === (m.samples ? fresh : old)) label.textContent = m.samples ? old : fresh
      at("outdated").textContent = m.text
      at("outdated").hidden = !m.text
    },
    notice: (m) => notice(m.text),
    ready,
    python: (m) => { at("code-text").textContent = m.text; at("code").showModal() },
    json: (m) => save(new Blob([m.text], { type: "application/json" }), "vkernel-explore.json"),
  }
  model.on("msg:custom", (event) => { const m = event.data ?? event; handlers[m.kind]?.(m) })
  send("hello", { dark: !window.location.search.includes("v=") && window.matchMedia("(prefers-color-scheme: dark)").matches })
  return document.createElement("span")
}
