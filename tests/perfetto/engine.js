// Runs the trace processor of Perfetto's web page (engine_bundle.js and trace_processor.wasm in the folder given) in node.
// stdin and stdout carry messages of its RPC stream, each after its length (4 bytes, little endian).
"use strict";
const fs = require("fs");
const path = require("path");
const vm = require("vm");

const folder = process.argv[2];
const { stdin, stdout } = process;
const exit = process.exit.bind(process);

// Not node's own report, which quotes the line of the bundle: all of it.
function fail(error) {
  fs.writeSync(2, String(error && error.message ? error.message : error) + "\n");
  exit(1);
}
process.on("uncaughtException", fail);
process.on("unhandledRejection", fail);

// The bundle is meant for a web worker, and refuses to run in what looks like node.
WebAssembly.instantiateStreaming = undefined;
globalThis.self = globalThis;
globalThis.WorkerGlobalScope = function () {};
globalThis.importScripts = () => {};
globalThis.location = { href: "http://perfetto/engine_bundle.js" };
const read = (url) => fs.readFileSync(path.join(folder, path.basename(String(url))));
globalThis.fetch = async (url) => new Response(read(url));
globalThis.XMLHttpRequest = class {
  open(method, url) {
    this.url = url;
  }
  send() {
    const data = read(this.url);
    this.status = 200;
    this.response = data.buffer.slice(data.byteOffset, data.byteOffset + data.length);
    if (this.onload) this.onload();
  }
};
for (const kind of ["log", "warn", "error"]) console[kind] = (...text) => fs.writeSync(2, text.join(" ") + "\n");

const node = globalThis.process;
globalThis.process = undefined;
// Keep the object that the bundle hides: it tells when it can be used.
const code = fs.readFileSync(path.join(folder, "engine_bundle.js"), "utf8");
vm.runInThisContext(code.replace(/new (\w+\.WasmBridge)/, "self.bridge=new $1"), { filename: "engine_bundle.js" });
globalThis.process = node;

const port = {
  postMessage(reply) {
    const length = Buffer.alloc(4);
    length.writeUInt32LE(reply.length);
    stdout.write(length);
    stdout.write(Buffer.from(reply));
  },
};
self.onmessage({ data: port });

function begin() {
  if (!self.bridge.reqBufferAddr) return setTimeout(begin, 10);
  let pending = Buffer.alloc(0);
  stdin.on("data", (more) => {
    pending = Buffer.concat([pending, more]);
    while (pending.length >= 4 && pending.length >= 4 + pending.readUInt32LE(0)) {
      const end = 4 + pending.readUInt32LE(0);
      port.onmessage({ data: new Uint8Array(pending.subarray(4, end)) });
      pending = pending.subarray(end);
    }
  });
}
begin();
