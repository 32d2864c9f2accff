// A page that is opened from a file may not start a worker: a frame takes the place of the one that searches.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      frame.srcdoc = "<!doctype html>"
      this.started = new Promise((resolve) => {
        frame.addEventListener("load", () => {
          const inner = frame.contentWindow
          inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
          const script = inner.document.createElement("script")
          script.src = address
          script.addEventListener("load", () => resolve(inner))
          inner.document.body.append(script)
        })
      })
      document.body.append(frame)
    }

    postMessage(data) {
      this.started.then((inner) => inner.dispatchEvent(new inner.MessageEvent("message", { data })))
    }
  }
}
