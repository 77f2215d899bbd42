// Lets search work in pages that are opened as files: browsers refuse a Worker there, so its script runs in a hidden
// frame. The theme looks for the name IFrameWorker, and without this file would load one from another host.
(() => {
  class IFrameWorker extends EventTarget {
    constructor(url) {
      super();
      this.onmessage = null;
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.appendChild(this.frame);
      this.receive = (event) => {
        if (event.source !== this.frame.contentWindow) return;
        const message = new MessageEvent("message", { data: event.data });
        this.dispatchEvent(message);
        if (this.onmessage) this.onmessage(message);
      };
      window.addEventListener("message", this.receive);
      const inside = this.frame.contentWindow;
      inside.document.open();
      inside.document.write(
        "<!doctype html><script>" +
          "window.postMessage = (data) => parent.postMessage(data, '*');" +
          "window.importScripts = (...urls) => urls.reduce((done, url) => done.then(() => new Promise((ok, failed) => {" +
          "const script = document.createElement('script');" +
          "script.src = url; script.onload = ok; script.onerror = failed; document.body.appendChild(script);" +
          "})), Promise.resolve());" +
          "<\/script><body><script src=\"" + encodeURI(String(url)) + "\"><\/script>",
      );
      inside.document.close();
      this.loaded = new Promise((resolve) => this.frame.addEventListener("load", resolve, { once: true }));
    }

    postMessage(data) {
      this.loaded.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      window.removeEventListener("message", this.receive);
      this.frame.remove();
    }
  }

  window.IFrameWorker = IFrameWorker;
  if (window.location.protocol === "file:") window.Worker = IFrameWorker;
})();
