// Perfetto's trace processor, as it is built for browsers, in Node: reads a TraceProcessorRpcStream from standard input
// and writes its answers to standard output. Argument: the folder of engine_bundle.js and trace_processor*.wasm.
const fs = require("fs"), path = require("path"), vm = require("vm");
const folder = process.argv[2], asked = new Uint8Array(fs.readFileSync(0));
globalThis.process = undefined; // it refuses Node, and takes what has these for a browser's worker
globalThis.self = globalThis;
globalThis.location = { href: "" };
globalThis.importScripts = globalThis.WorkerGlobalScope = function () {};
console.log = console.warn = console.error;
globalThis.XMLHttpRequest = class {
  open(_, name) { this.response = fs.readFileSync(path.join(folder, path.basename(name))); }
  send() {}
};
vm.runInThisContext(fs.readFileSync(path.join(folder, "engine_bundle.js"), "utf8"));
const port = { postMessage: (bytes) => { for (let at = 0; at < bytes.length; ) at += fs.writeSync(1, bytes, at); } };
globalThis.onmessage({ data: port });
setImmediate(() => port.onmessage({ data: asked }));
