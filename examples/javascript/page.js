// Runs the attribution model in the browser on a digit that the user draws, and shows prediction and relevance.

import * as ort from "./node_modules/onnxruntime-web/dist/ort.wasm.min.mjs";

const MODEL = new URLSearchParams(location.search).get("model") ?? "../../demo/digits.onnx";
const SIDE = 8; // of the network's input images
const BITMAP = 32; // the data set's digits come from bitmaps of this size, with pixels counted in blocks of 4×4

const drawing = document.getElementById("drawing");
const pen = drawing.getContext("2d", { willReadFrequently: true });
const status = document.getElementById("status");

let session = null;
let chosen = null; // the class to explain; null: the prediction
let running = false;
let changed = false;

function clear() {
  pen.fillStyle = "black";
  pen.fillRect(0, 0, drawing.width, drawing.height);
  chosen = null;
}

/** The bounding box of the drawn pixels, or null. */
function extent() {
  const { data, width, height } = pen.getImageData(0, 0, drawing.width, drawing.height);
  let [left, top, right, bottom] = [width, height, -1, -1];
  for (let y = 0; y < height; y++) {
    for (let x = 0; x < width; x++) {
      if (data[4 * (y * width + x)] > 127) {
        [left, right] = [Math.min(left, x), Math.max(right, x)];
        [top, bottom] = [Math.min(top, y), Math.max(bottom, y)];
      }
    }
  }
  return right < 0 ? null : { left, top, width: right - left + 1, height: bottom - top + 1 };
}

/** The drawing as network input: scaled to fit, centred, as 8×8 shares of white. */
function pixels() {
  const found = extent();
  const result = new Float32Array(SIDE * SIDE);
  if (found === null) return result;
  const bitmap = new OffscreenCanvas(BITMAP, BITMAP).getContext("2d", { willReadFrequently: true });
  const scale = BITMAP / Math.max(found.width, found.height);
  const [width, height] = [found.width * scale, found.height * scale];
  bitmap.drawImage(
    drawing, found.left, found.top, found.width, found.height,
    (BITMAP - width) / 2, (BITMAP - height) / 2, width, height,
  );
  const { data } = bitmap.getImageData(0, 0, BITMAP, BITMAP);
  const block = BITMAP / SIDE;
  for (let y = 0; y < BITMAP; y++) {
    for (let x = 0; x < BITMAP; x++) {
      const place = Math.floor(y / block) * SIDE + Math.floor(x / block);
      result[place] += data[4 * (y * BITMAP + x)] / 255 / block ** 2;
    }
  }
  return result;
}

async function run(image, target) {
  return session.run({
    input: new ort.Tensor("float32", image, [1, 1, SIDE, SIDE]),
    target: new ort.Tensor("int64", BigInt64Array.of(BigInt(target)), [1]),
  });
}

const largest = (values) => values.indexOf(Math.max(...values));

/** Update prediction and relevance. Changes during a run trigger one more run, on the newest drawing. */
async function update() {
  changed = true;
  if (running || session === null) return;
  running = true;
  try {
    while (changed) {
      changed = false;
      const image = pixels();
      let results = await run(image, chosen ?? 0);
      const outputs = Array.from(results.output.data);
      const prediction = largest(outputs);
      const explained = chosen ?? prediction;
      if (explained !== (chosen ?? 0)) results = await run(image, explained);
      show(image, outputs, prediction, explained, Array.from(results.relevance.data));
    }
  } catch (error) {
    status.textContent = `error: ${error.message}`;
  } finally {
    running = false;
  }
}

function paint(id, colours) {
  const context = document.getElementById(id).getContext("2d");
  const size = context.canvas.width / SIDE;
  colours.forEach((colour, place) => {
    context.fillStyle = colour;
    context.fillRect((place % SIDE) * size, Math.floor(place / SIDE) * size, size, size);
  });
}

function show(image, outputs, prediction, explained, relevance) {
  const limit = Math.max(...relevance.map(Math.abs)) || 1;
  paint("seen", Array.from(image, (value) => `rgb(${255 * value} ${255 * value} ${255 * value})`));
  paint("relevance", relevance.map((value) => {
    const rest = 255 * (1 - Math.abs(value) / limit);
    return value > 0 ? `rgb(255 ${rest} ${rest})` : `rgb(${rest} ${rest} 255)`;
  }));
  document.getElementById("explained").textContent = explained;
  document.getElementById("outputs").replaceChildren(...outputs.map((value, label) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = `${label}: ${value.toFixed(2)}`;
    button.classList.toggle("prediction", label === prediction);
    button.classList.toggle("explained", label === explained);
    button.addEventListener("click", () => { chosen = label; update(); });
    const item = document.createElement("li");
    item.append(button);
    return item;
  }));
  status.textContent = `the network reads ${prediction}`;
  // The displayed results, for scripts that drive the page.
  document.body.dataset.results = JSON.stringify({ image: Array.from(image), outputs, prediction, explained, relevance });
}

function place(event) {
  const box = drawing.getBoundingClientRect();
  return [(event.clientX - box.left) * drawing.width / box.width, (event.clientY - box.top) * drawing.height / box.height];
}

let last = null;
drawing.addEventListener("pointerdown", (event) => {
  drawing.setPointerCapture(event.pointerId);
  last = place(event);
  chosen = null;
});
drawing.addEventListener("pointermove", (event) => {
  if (last === null) return;
  const next = place(event);
  pen.strokeStyle = "white";
  pen.lineWidth = 26;
  pen.lineCap = pen.lineJoin = "round";
  pen.beginPath();
  pen.moveTo(...last);
  pen.lineTo(...next);
  pen.stroke();
  last = next;
  update();
});
for (const name of ["pointerup", "pointercancel"]) drawing.addEventListener(name, () => { last = null; });
document.getElementById("clear").addEventListener("click", () => { clear(); update(); });

clear();
ort.env.wasm.numThreads = 1; // more threads need a cross-origin isolated page
try {
  session = await ort.InferenceSession.create(MODEL);
  status.textContent = "ready";
  update();
} catch (error) {
  status.textContent = `error: the model ${MODEL} cannot be loaded (${error.message}); make demo writes it`;
}
