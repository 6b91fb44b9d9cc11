// The page: the browser owns the state, the server is a function of it. This file connects the parts.
import { WINDOW, clamp, toWindow } from "./axes.js"
import { number } from "./colours.js"
import { mapPicture, polygons, shownScale } from "./maps.js"
import { Controls } from "./controls.js"
import { all, at, make } from "./dom.js"
import { Factors } from "./factors.js"
import { lawScale } from "./laws.js"
import { addHints, banner, hideHint, notice, startNotices } from "./notices.js"
import { showClaims, showGlossary, showJob, showResult, showTime } from "./panel.js"
import { Paths } from "./particles.js"
import { editPoints } from "./points.js"
import { describe } from "./probe.js"
import { copy, download, savePicture } from "./save.js"
import { Latest, Socket } from "./socket.js"
import { Stage } from "./stage.js"
import { Store } from "./store.js"
import { Tiles, lawsOf } from "./tiles.js"
import { Clock } from "./time.js"
import { Tour } from "./tour.js"

const boot = JSON.parse(at("boot").textContent)
const SOON = 60  // milliseconds after the last change until a run starts
const LONGER = 250  // the same for keys and sliders, of which several follow each other
const RENAME = 120  // milliseconds between two changes of the address
const HINT = "Point at a place to see what training shows a model there. Click adds a training point, drag moves one."
const HINT_OUTCOME = "Where samples end, at the cutoff time ε. Click adds a training point, drag moves one; the field at time t has a probe."
const QUIET = ["t", "map", "layers", "compare", "outcome", "dark", "d", "version"]  // fields that a run does not depend on

const store = new Store({ state: boot.state, view: { stage: boot.state.outcome ? "outcome" : "field", shown: "law", factor: null } })
let map = null, result = null, laws = [], range = [boot.state.eps, 1], selected = 0, probe = null, pinned = false, named = null
let run = 0, lasting = 0, wantsAnother = false, asked = "", soon = 0, connected = false, playSoon = false

const inputsOf = (state) => JSON.stringify(Object.entries(state).filter(([name]) => !QUIET.includes(name)).sort())
const d = () => store.state.d
const memberShown = () => (store.view.shown.startsWith("member") ? Number(store.view.shown.slice(7)) : null)
const stale = () => !!result && result.key !== inputsOf(store.state)

// Scene: everything that is drawn, from the state and the last answers
function sceneOf() {
  const { state, view } = store, fits = result && result.d === d(), own = fits ? laws : []
  const part = (who) => {
    const found = own.find((item) => item.who === who), twin = who === "twin"
    return { who, law: found?.law, title: found?.name, paths: fits ? (twin ? result.twinPaths : result.paths) : null }
  }
  let parts = [part(own.some((item) => item.who === view.shown) ? view.shown : "law")]
  if (state.compare) parts = [part("law"), part("twin")]
  parts[0].titled = d() === 2 && view.stage === "outcome"
  if (parts.length === 1 && !parts[0].titled) parts[0].title = parts[0].who.startsWith("member") ? parts[0].title : null
  if (parts[0].title) parts[0].titled = true
  if (state.compare && parts[1] && !parts[1].title) Object.assign(parts[1], { title: "exact targets (J0)" })
  return { state, view, parts, map: map?.d === d() ? map : null, result: fits ? result : null, layers: new Set(state.layers), stale: stale(), t: state.t, range, selected, probe }
}

const stage = new Stage(at("canvas"), at("legend"), sceneOf)

// Server
const wanted = () => {
  const member = memberShown(), state = { ...store.state, outcome: store.view.stage === "outcome" }
  const message = { kind: "map", state, ...(member === null ? {} : { member }) }
  return Object.defineProperty(message, "of", { value: store.doc })  // stays here: it is not enumerable
}

const maps = { ask: () => {} }, probes = { ask: () => {} }
const address = `${location.protocol === "https:" ? "wss" : "ws"}://${location.host}${location.pathname.replace(/[^/]*$/, "")}socket`
const socket = new Socket(address, opened, gone)
Object.assign(maps, { channel: new Latest(socket, showMap), ask: () => maps.channel.ask(wanted()) })
Object.assign(probes, { channel: new Latest(socket, showProbe) })

function opened() {
  connected = true
  banner("")
  maps.channel.reset()
  probes.channel.reset()
  run = 0
  asked = ""
  maps.ask()
  startRun()
}

function gone() {
  if (connected) showJob({ stale: true, label: "not connected" })
  connected = false
  banner("The server has stopped or cannot be reached. Your points are kept; the page connects again by itself.")
}

// The address follows the state, but not at every frame of a drag, which some browsers refuse.
let renaming = 0, renamed = -RENAME, latest = null
function rename(state, query) {
  latest = { state, query }
  const wait = renamed + RENAME - performance.now()
  if (wait <= 0) setAddress()
  else renaming ||= setTimeout(setAddress, wait)
}

function setAddress() {
  clearTimeout(renaming)
  renaming = 0
  renamed = performance.now()
  history.replaceState(null, "", `?${latest.query}`)
  named = latest.state
  if (named === store.state) window.dispatchEvent(new CustomEvent("named"))
}

function showMap(answer, message, newest) {
  if (answer.kind === "error") { notice(answer.text); return }
  if (answer.kind !== "map") return
  const { arrays } = answer, scale = shownScale(answer.scale, message.state.d)
  range = answer.range
  map = {
    ...answer, scale, of: message.of, d: message.state.d, arrows: arrays.arrows, exactArrows: arrays.exact_arrows,
    lines: polygons(arrays.lines, answer.line_sizes ?? []), sheet: mapPicture(arrays, scale, answer),
  }
  if (newest && message.of === store.doc) {
    rename(store.state, answer.query)
    if (answer.t !== undefined && Math.abs(answer.t - store.state.t) > 1e-9 * answer.t) store.correct({ t: answer.t })
    at("app").dataset.ready = "1"
  }
  showTime(answer.panel)
  showMarks()
  clock.show()
  stage.draw()
  window.dispatchEvent(new CustomEvent("map"))
}

// Runs
function scheduleRun(wait) {
  clearTimeout(soon)
  soon = setTimeout(startRun, wait)
}

function startRun() {
  const key = inputsOf(store.state)
  if (!connected || key === asked || (store.held && !clock.playing)) return
  socket.forget(lasting)
  asked = key
  showJob({ busy: true, label: "starting", share: 0, stale: stale() })
  const state = store.state
  lasting = run = socket.request({ kind: "run", state }, (answer) => {
    if (answer.kind === "progress") showJob({ busy: true, label: answer.label, share: answer.share, stale: stale() })
    else if (answer.kind === "learned") modelsAreThere()
    else run = 0
    if (answer.kind === "result") showRun(answer, state, key)
    else if (answer.kind === "error") { notice(answer.text); showJob({ stale: true, label: "this run failed" }) }
  }, true)
}

// Results that were computed before come without their models, which are trained meanwhile.
function modelsAreThere() {
  if (result) result.learned = true
  maps.ask()
  if (wantsAnother) { notice(""); another() }
}

function showRun(answer, state, key) {
  const points = state.points
  const { arrays } = answer
  result = { ...answer, state, key, points, d: points[0].length, learned: answer.learned ?? !answer.precomputed, extra: [] }
  result.scale = lawScale(result)
  result.paths = arrays.frames ? new Paths(Array.from(arrays.times.data), arrays.frames, points) : null
  result.twinPaths = arrays.twin_frames ? new Paths(Array.from(arrays.times.data), arrays.twin_frames, points) : null
  laws = lawsOf(result)
  showResult(result)
  showJob({ share: 1, stale: stale() })
  if (store.state.map.startsWith("variance") || memberShown() !== null) maps.ask()  // they are made of the run
  if (playSoon && !stale()) { playSoon = false; clock.play(visible()) }
  refresh()
}

at("job-cancel").onclick = () => {
  if (!run) return
  socket.forget(lasting)
  socket.request({ kind: "cancel" }, () => {})
  run = 0  // `asked` stays: only another state or the button starts a run again
  showJob({ stale: true, label: "stopped" })
}
at("job-run").onclick = () => { asked = ""; startRun() }

// Points
function add(point, held = false) {
  const { points, weights } = store.state
  if (points.length >= boot.limits.points) { notice(`The page takes up to ${boot.limits.points.toLocaleString("en")} points.`); return false }
  const patch = { points: [...points, point ?? free()], weights: [...weights, 1] }
  if (held) store.preview(patch)
  else store.change(patch)
  select(points.length)
  return true
}

function remove() {
  const { points, weights } = store.state
  if (points.length < 2) { notice("A training set has at least one point."); return }
  const k = selected, without = (list) => list.filter((_, i) => i !== k)
  store.change({ points: without(points), weights: without(weights) })
  select(Math.min(k, points.length - 2))
}

// The first place of a low-discrepancy sequence that no point has.
function free() {
  for (let k = 0; ; k++) {
    const spot = [0.618034, 0.754878].slice(0, d()).map((r) => toWindow(WINDOW * (2 * ((0.5 + k * r) % 1) - 1)))
    if (!store.state.points.some((point) => point.every((v, i) => v === spot[i]))) return spot
  }
}

function select(k) { selected = k; showPoint(); stage.draw() }
function pick(by) { const n = store.state.points.length; select((selected + by + n) % n) }

function showPoint() {
  const { points, weights } = store.state, n = points.length
  selected = clamp(selected, 0, n - 1)
  at("point-name").textContent = `point ${selected + 1} of ${n}`
  const fill = (id, v) => { if (!at(id).dataset.typing) at(id).value = v }  // what is being typed stays
  fill("point-x", points[selected][0])
  fill("point-y", points[selected][1] ?? 0)
  fill("point-w", weights[selected] ?? 1)
  at("point-y-label").hidden = d() === 1
  at("point-remove").disabled = n < 2
}

for (const [id, c] of [["point-x", 0], ["point-y", 1], ["point-w", null]]) {
  at(id).oninput = () => { at(id).dataset.typing = "1" }
  at(id).onblur = () => { delete at(id).dataset.typing; showPoint() }
  at(id).onchange = () => {
    const value = at(id).valueAsNumber, { points, weights } = store.state
    delete at(id).dataset.typing
    const put = (list, item) => list.map((old, k) => (k === selected ? item : old))
    const moved = () => points[selected].map((v, k) => (k === c ? toWindow(value) : v))
    if (c === null && !(value >= 1 && value <= boot.limits.weight)) notice(`A point is repeated 1 to ${boot.limits.weight} times.`)
    else if (Number.isNaN(value)) notice(`A coordinate must be a number between -${WINDOW} and ${WINDOW}.`)
    else store.change(c === null ? { weights: put(weights, Math.round(value)) } : { points: put(points, moved()) }, {}, `field ${id} ${selected}`)
    showPoint()
  }
}
at("point-x").min = at("point-y").min = -WINDOW
at("point-x").max = at("point-y").max = WINDOW
at("point-w").max = boot.limits.weight
at("point-before").onclick = () => pick(-1)
at("point-after").onclick = () => pick(1)
at("point-add").onclick = () => add(null)
at("point-remove").onclick = remove
for (const [where, sets] of Object.entries(boot.content.presets)) {
  at("preset").append(make("optgroup", { label: where }, ...Object.entries(sets).map(([value, caption]) => make("option", { value, textContent: caption }))))
}
const presetOf = (points) => Object.keys(boot.presets).find((name) => JSON.stringify(boot.presets[name]) === JSON.stringify(points)) ?? ""
at("preset").onchange = () => {
  const points = boot.presets[at("preset").value]
  if (!points) return
  store.change({ points, weights: points.map(() => 1) }, { factor: null })
  select(0)
}
at("csv").onclick = () => at("csv-file").click()
at("csv-file").onchange = async () => {
  const [file] = at("csv-file").files
  if (!file) return
  if (file.size > boot.limits.bytes) notice(`This file has ${(file.size / 1e6).toFixed(1)} MB; the page takes up to 1 MB.`)
  else ask("csv-import", { text: await file.text() }, imported)
  at("csv-file").value = ""
}

function imported(answer) {
  store.change({ points: answer.points, weights: answer.weights })
  select(0)
  notice(answer.sentence ?? answer.text)
}

// Probe
function probeAt(x, t = null) {
  if (store.held || at("app").dataset.view === "outcome") return  // the outcome has no time at which to probe
  probe = { x, t: t ?? store.state.t, answer: probe?.answer }
  probes.channel.ask({ kind: "probe", x, state: { ...store.state, t: probe.t } })
  stage.draw()
}

function showProbe(answer, message, newest) {
  if (answer.kind !== "probe" || !probe) return
  probe = { ...probe, answer, x: newest ? message.x : probe.x }
  const [place, ...texts] = describe(answer, message.x, message.state.t)
  at("probe").replaceChildren(make("b", { textContent: place }), ` ${texts.join(" ")}`)
  if (pinned) at("where").textContent = at("probe").innerText
  stage.draw()
}

function endProbe() {
  if (!probe) return
  probe = null
  showHint()
  stage.draw()
}

function showHint() { if (!probe) at("probe").textContent = at("app").dataset.view === "outcome" ? HINT_OUTCOME : HINT }

function pin() {
  pinned = !pinned
  at("pin").setAttribute("aria-pressed", pinned)
  if (pinned) probeAt(probe?.x ?? (d() === 2 ? [0.1, 0.1] : [0.4]))
  else endProbe()
}

function moveProbe([x, y], far) {
  const step = far ? 0.2 : 0.05
  probeAt(probe.x.map((v, c) => toWindow(v + step * [x, y][c])), d() === 1 && y ? clamp(probe.t * 1.15 ** (far ? 4 * y : y), ...range) : probe.t)
}

// Time
const visible = () => (result && result.d === d() && result.paths ? result.paths.visible() : range[1])
const clock = new Clock(at("time"), at("play"), at("time-value"), { store, range: () => range, visible, started: (t) => announce(`from random places at t = ${number(t)}`) })
let announcing = 0
function announce(text) {
  clearTimeout(announcing)
  at("outdated").textContent = text
  at("outdated").hidden = false
  announcing = setTimeout(() => { announcing = 0; showMarks() }, 1800)
}

// Header
at("theme").onclick = () => store.change({ dark: !store.state.dark })
// The tour is one step: whoever undoes it leaves it.
const undo = () => (tour.running ? tour.end() : store.undo())
const redo = () => (tour.running ? tour.end() : store.redo())
at("undo").onclick = () => undo()
at("redo").onclick = () => redo()
at("link").onclick = async () => {
  closeMenu()
  if (named !== store.state) await Promise.race([new Promise((done) => addEventListener("named", done, { once: true })), new Promise((done) => setTimeout(done, 3000))])
  await copy(location.href)
  notice(named === store.state ? "The address of this picture is on the clipboard." : "The server cannot be reached: the address on the clipboard is that of an earlier picture.")
}

// A single request; errors are shown as sentences.
function ask(kind, rest, done) {
  const id = socket.request({ kind, state: store.state, ...rest }, (answer) => {
    if (answer.kind === "error") notice(answer.text)
    else if (answer.kind === kind) done(answer)
  })
  if (!id) notice("The server cannot be reached, so this has to wait.")
  return id
}

const closeMenu = () => { at("save").open = false }
at("python").onclick = () => { closeMenu(); ask("python", pinned && probe ? { x: probe.x, at: probe.t } : {}, ({ text }) => { at("code-text").textContent = text; at("code").showModal() }) }
at("json").onclick = () => { closeMenu(); ask("json", {}, ({ text }) => download(new Blob([text], { type: "application/json" }), "vkernel-explore.json")) }
at("csv-save").onclick = () => { closeMenu(); ask("csv", {}, ({ text }) => download(new Blob([text], { type: "text/csv" }), "vkernel-explore.csv")) }
at("png").onclick = () => {
  closeMenu()
  const old = stale() ? ["Samples are of an earlier state."] : []
  const texts = [at("headline").textContent, pictured(), at("sentences").innerText.replaceAll("\n", " "), ...old]
  savePicture(sceneOf(), texts.filter(Boolean), d() === 2 ? [...at("tiles").children] : [], "vkernel-explore.png")
}
// The settings of a picture, for its caption.
function pictured() {
  const { process, K, ratio, features, sampler } = store.state, linear = ["linear", "average", "effective"].includes(sampler)
  const parts = [at("control-sampler").selectedOptions[0].textContent, `${process}, ε = ${number(store.state.eps)}`]
  if (linear) parts.push(`F/P = ${number(ratio)}, ${features} features`)
  if (linear || ["ntk", "mlp"].includes(sampler)) parts.push({ 0: "J0", 1: "J1" }[K] ?? `K = ${K}`)
  if (at("app").dataset.view !== "outcome") parts.push(at("time-value").textContent)
  return parts.join(" · ")
}
at("code-copy").onclick = async () => { await copy(at("code-text").textContent); at("code").close(); notice("The script is on the clipboard.") }
at("code-close").onclick = () => at("code").close()

// Views of the outcome
for (const b of all("#views [data-view]")) b.onclick = () => store.change({}, { stage: b.dataset.view })
const show = (who) => store.change({}, { shown: who, stage: d() === 2 ? "outcome" : store.view.stage }, "shown")
const tiles = new Tiles((who) => show(who))
at("compare").onclick = () => {  // what is compared are outcomes
  const on = !store.state.compare
  store.change({ compare: on }, { shown: "law", ...(on ? { stage: "outcome" } : {}) })
}
at("another").onclick = () => { wantsAnother = true; another() }

// One more model of the ensemble: its law becomes a tile, its arrows are drawn.
function another() {
  if (!result?.learned) { notice("The models are being trained; the next one follows in a moment."); return }
  wantsAnother = false
  const of = result, k = (result.arrays.members?.shape[0] ?? 0) + result.extra.length
  if (k >= result.members) { showMember(memberShown() === null ? 0 : (memberShown() + 1) % k); return }
  ask("member", { k }, (answer) => {
    if (result !== of) return
    result.extra.push({ k, law: answer.arrays.law })
    laws = lawsOf(result)
    showMember(k)
  })
}

function showMember(k) {
  const { layers } = store.state
  store.change({ compare: false, layers: layers.includes("arrows") ? layers : [...layers, "arrows"] }, { shown: `member ${k}` }, "another")
}

// After a change
function showMarks() {
  const old = [], { layers } = store.state
  if (stale() && result.d === d()) old.push(...(layers.includes("particles") ? ["particles"] : []), ...(store.state.map.startsWith("variance") ? ["map of V"] : []), "laws")
  at("app").classList.toggle("earlier", stale())
  if (announcing) return
  const awaited = store.state.map.startsWith("variance") && map?.d === d() && !map.sheet && !old.length
  at("outdated").textContent = old.length ? `of an earlier state: ${old.join(", ")}` : awaited ? "the map of V follows when its models are trained" : ""
  at("outdated").hidden = !old.length && !awaited
}

function refresh() {
  const { state, view } = store, twins = !!result?.arrays.twin_law && result.d === d()
  document.documentElement.dataset.theme = state.dark ? "dark" : "light"
  at("theme").setAttribute("aria-pressed", state.dark)
  at("app").dataset.d = d()
  at("app").dataset.cells = state.compare ? 2 : 1
  at("app").dataset.view = d() === 2 ? view.stage : "field"
  at("canvas").setAttribute("aria-label", d() === 2 ? "Training points in the plane" : "Training points on the line")
  at("preset").value = presetOf(state.points)
  at("undo").disabled = !store.past.length && !store.held
  at("redo").disabled = !store.future.length
  controls.show(state)
  factors.show(store.doc)
  showPoint()
  clock.show()
  for (const b of all("#views [data-view]")) b.setAttribute("aria-pressed", b.dataset.view === view.stage)
  at("compare").setAttribute("aria-pressed", state.compare)
  at("compare").hidden = !twins && !state.compare
  at("another").hidden = !result?.arrays.members || result.d !== d()
  at("outcome-buttons").hidden = at("compare").hidden && at("another").hidden
  tiles.draw(result?.d === d() ? result : null, result?.d === d() ? laws : [], state.compare ? "" : view.shown, state.dark)
  showMarks()
  showHint()
  stage.draw()
}

let before = null
store.listen(() => {
  const { state } = store, old = before
  before = store.doc
  if (old?.state !== state || old?.view.shown !== store.view.shown || old?.view.stage !== store.view.stage) maps.ask()
  if (probe && old?.state !== state) { if (pinned && probe.x.length === d()) probeAt(probe.x); else endProbe() }
  refresh()
  const key = inputsOf(state)
  if (key === asked) { clearTimeout(soon); return }
  if (run) {  // what it computes is of an earlier state, and would slow the map of this one
    socket.forget(lasting)
    socket.request({ kind: "cancel" }, () => {})
    run = 0
    asked = ""  // a state that comes back is computed again
  }
  showJob({ stale: true })
  scheduleRun(old && inputsOf(old.state) === key ? SOON : LONGER)
})

// Start
const page = {
  store, stage, get selected() { return selected }, get pinned() { return pinned }, select, pick, add, remove, pin, probeAt, moveProbe, endProbe,
  say: (text) => { at("where").textContent = text }, clock,
  playWhenReady: (wanted) => { playSoon = wanted && (!result || stale()); if (wanted && !playSoon) clock.play(visible()) },
}
const pinButton = make("button", { id: "pin", textContent: "Probe", attributes: { "aria-pressed": "false" }, dataset: { tip: "What training shows a model at one place: hover, long-press, or press P and use the arrow keys." } })
pinButton.onclick = pin
const controls = new Controls(boot.content, store)
at("layers").append(pinButton)
const factors = new Factors(boot.factors ?? [], store)
const tour = new Tour(boot.tour ?? [], page)
editPoints(at("canvas"), page)
showGlossary(boot.content.glossary)
showClaims(boot.claims)
startNotices()
addHints()

window.addEventListener("keydown", (event) => {
  const command = event.ctrlKey || event.metaKey, key = event.key.toLowerCase()
  if (command && !event.altKey && (key === "z" || key === "y")) {
    event.preventDefault()
    if (key === "y" || event.shiftKey) redo()
    else undo()
  } else if (event.key === "Escape") escape()
  else if (event.key === " " && !event.target.closest?.("input, select, textarea, button, summary, dialog")) { event.preventDefault(); clock.button.click() }
})

// Escape closes what is open, the last opened first.
function escape() {
  if (at("code").open) return  // the dialog closes itself
  hideHint()
  at("notice").hidden = true
  if (at("save").open) { closeMenu(); at("save").querySelector("summary").focus() }
  else if (pinned) pin()
  else if (tour.running) tour.end()
}
document.addEventListener("click", (event) => { if (!event.target.closest("#save")) closeMenu() })

if (!location.search && window.matchMedia("(prefers-color-scheme: dark)").matches) store.correct({ dark: true })
else refresh()
if (boot.problem) notice(boot.problem)
window.explore = { store, stage, get map() { return map }, get current() { return map?.of === store.doc }, get settled() { return named === store.state }, get result() { return result } }  // for tests, and for the curious
