// Runs the page's own script against a live server with a DOM of stubs: node page_driver.mjs <page> <url> [none | titles…]
// none: no file goes along; titles: of the model's examples, which are clicked in turn
import fs from "node:fs";
import vm from "node:vm";

const [page, base, ...clicked] = process.argv.slice(2);
const code = fs.readFileSync(page, "utf8").match(/<script>([\s\S]*)<\/script>/)[1];
const elements = {};
const element = (tag) => ({
  tag, children: [], files: [], value: "", textContent: "",
  append(...nodes) { this.children.push(...nodes); },
  replaceChildren(...nodes) { this.children = nodes; },
  insertBefore(node) { this.children.push(node); },
  querySelectorAll(selector) {
    const boxes = this.children.map((label) => label.children[0]);
    return selector.endsWith(":checked") ? boxes.filter((box) => box.checked) : boxes;
  },
  scrollIntoView() {},
});
const played = { samples: 0, pieces: 0, rate: 0 };
class AudioContext {
  currentTime = 0;
  createBuffer(channels, length, rate) {
    played.samples += length;
    played.rate = rate;
    return { duration: length / rate, getChannelData: () => new Float32Array(length) };
  }
  createBufferSource() { return { connect() {}, start() { played.pieces += 1; } }; }
  close() {}
}
class FileReader {
  readAsDataURL(file) { this.result = file.url; queueMicrotask(() => this.onload()); }
}
const world = vm.createContext({
  document: { getElementById: (id) => (elements[id] ??= element(id)), createElement: element },
  fetch: (path, options) => fetch(`${base}/${path}`, options),
  Option: function (name) { this.value = name; },
  URL: { createObjectURL: (blob) => `blob:${blob.size}` },
  FormData, setTimeout, AudioContext, FileReader, AbortController, TextDecoderStream, Blob, performance, atob,
});
vm.runInContext(`${code}\nglobalThis.connected = connect();`, world);
await world.connected;
elements.voice.value = "Ben";
elements.text.value = "hi";
elements.steps.value = "4";
if (!clicked.length) elements.file.files = [{ type: "image/png", name: "a.png", url: "data:image/png;base64,AAAA", size: 3 }];
const examples = elements.examples.children;
if (clicked.length && clicked[0] !== "none") for (const title of clicked) await examples.find((node) => node.textContent === title).onclick();
else await vm.runInContext("send()", world);
const shown = elements.log.children, [body, facts, ...more] = shown.at(-1).children;
process.stdout.write(JSON.stringify({
  model: elements.model.textContent, voices: elements.voice.children.length, outputs: elements.outputs.children.length,
  examples: examples.map((node) => node.textContent ?? node),
  sent: shown.slice(0, -1).map(({ className, children: [text, ...media] }) =>
    [className, text.textContent, ...media.map((node) => [node.tag, node.src])]),
  said: body.textContent, facts: facts.textContent, audio: more.find((node) => node.tag === "audio")?.src, played,
  images: more.filter((node) => node.tag === "img").map((node) => node.src),
  videos: more.filter((node) => node.tag === "video").map((node) => node.src),
  progress: more.filter((node) => node.tag === "progress").map((node) => node.value),
  errors: more.filter((node) => node.className === "error").map((node) => node.textContent),
}));
