// Browsers refuse to start a worker for a page opened from a file. The search needs one, so run its script in a
// hidden frame that stands in for the worker.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      this.started = new Promise((resolve) => {
        frame.addEventListener("load", () => {
          const scope = frame.contentWindow;
          scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          const script = scope.document.createElement("script");
          script.src = new URL(url, location);
          script.addEventListener("load", () => resolve(scope));
          scope.document.body.append(script);
        }, { once: true });
      });
      document.body.append(frame);
    }

    postMessage(data) {
      this.started.then((scope) => scope.dispatchEvent(new scope.MessageEvent("message", { data })));
    }
  };
}
