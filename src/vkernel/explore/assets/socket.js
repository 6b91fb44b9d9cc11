// The websocket to the server: requests with increasing ids, binary answers, and reconnection.
const WAITS = [300, 600, 1200, 2500, 4000]  // milliseconds before attempts to connect again

// An answer is the length of a header, the header as JSON, and float32 arrays back to back.
export function decode(buffer) {
  const size = new DataView(buffer).getUint32(0, true)
  const answer = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, size)))
  let at = 4 + size
  const arrays = {}
  for (const [name, shape] of answer.arrays ?? []) {
    const count = shape.reduce((a, b) => a * b, 1)
    arrays[name] = { shape, data: new Float32Array(buffer, at, count) }
    at += 4 * count
  }
  return { ...answer, arrays }
}

export class Socket {
  constructor(address, onOpen, onGone) {
    Object.assign(this, { address, onOpen, onGone, id: 0, failures: 0, waiting: new Map() })
    this.connect()
  }

  get open() { return this.socket.readyState === WebSocket.OPEN }

  connect() {
    clearTimeout(this.timer)
    this.socket = new WebSocket(this.address)
    this.socket.binaryType = "arraybuffer"
    this.socket.onopen = () => { this.failures = 0; this.onOpen() }
    this.socket.onmessage = (event) => this.receive(decode(event.data))
    this.socket.onclose = () => {
      this.waiting.clear()  // what was under way is requested again after the connection
      this.onGone()
      this.timer = setTimeout(() => this.connect(), WAITS[Math.min(this.failures++, WAITS.length - 1)])
    }
  }

  // Sends a request; `answered` receives the answer that carries its id, and what is reported before. A `lasting` one
  // receives all until forget(id). Returns the id, or 0 when not connected.
  request(message, answered, lasting = false) {
    if (!this.open) return 0
    const id = ++this.id
    this.waiting.set(id, { answered, lasting })
    this.socket.send(JSON.stringify({ ...message, id }))
    return id
  }

  receive(answer) {
    const found = this.waiting.get(answer.id)
    if (found && !found.lasting) this.waiting.delete(answer.id)
    found?.answered(answer)
  }

  forget(id) { this.waiting.delete(id) }
}

// Keeps one request in flight. While it is pending only the newest next one is kept: a drag cannot overtake itself.
export class Latest {
  constructor(socket, answered) { Object.assign(this, { socket, answered, busy: 0, next: null }) }

  ask(message) {
    if (this.busy) { this.next = message; return }
    this.busy = this.socket.request(message, (answer) => {
      this.busy = 0
      const next = this.next
      this.next = null
      if (next) this.ask(next)
      this.answered(answer, message, !next)
    })
  }

  reset() { this.busy = 0; this.next = null }
}
