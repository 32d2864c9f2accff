// Checks an .onnx file of lrpfx with a runtime of JavaScript: the file holds inputs and the results that belong to them.
//
//     node check.js model.onnx [onnxruntime-web | onnxruntime-node]
//
// Prints the largest difference of each result, relative to its largest entry, and exits with 1 if one is too large.

import { readFileSync } from "node:fs";

const METADATA = 14; // the field of an ONNX model with its notes, pairs of key (1) and value (2)

// NumPy's name of a dtype -> the array that holds its values, and its name in ONNX Runtime.
const DTYPES = {
  "<f4": [Float32Array, "float32"],
  "<f8": [Float64Array, "float64"],
  "<i8": [BigInt64Array, "int64"],
  "<i4": [Int32Array, "int32"],
  "|i1": [Int8Array, "int8"],
  "|u1": [Uint8Array, "uint8"],
  "|b1": [Uint8Array, "bool"],
};

/** The fields of a protobuf message: number, and bytes or number. */
function* fields(content) {
  let place = 0;
  const number = () => {
    for (let [value, factor] = [0, 1]; ; factor *= 128) {
      const byte = content[place++];
      value += (byte & 127) * factor;
      if (byte < 128) return value;
    }
  };
  while (place < content.length) {
    const key = number();
    const value = number();
    if (key % 8 === 2) {
      yield [Math.floor(key / 8), content.subarray(place, place + value)];
      place += value;
    } else if (key % 8 === 0) {
      yield [Math.floor(key / 8), value];
    } else {
      throw new Error(`a field of the kind ${key % 8}, which ONNX models do not have here`);
    }
  }
}

/** The entries of a zip file without compression, as NumPy writes it. */
function* entries(content) {
  const end = content.length - 22;
  let place = content.readUInt32LE(end + 16);
  for (let count = content.readUInt16LE(end + 10); count > 0; count--) {
    const [size, local] = [content.readUInt32LE(place + 20), content.readUInt32LE(place + 42)];
    const lengths = [28, 30, 32].map((offset) => content.readUInt16LE(place + offset)); // of the name, and of what follows it
    const start = local + 30 + content.readUInt16LE(local + 26) + content.readUInt16LE(local + 28);
    yield [content.toString("utf8", place + 46, place + 46 + lengths[0]), content.subarray(start, start + size)];
    place += 46 + lengths.reduce((sum, length) => sum + length);
  }
}

/** An array of an .npy file: its dtype in ONNX Runtime, its shape and its values. */
function arrayOf(content) {
  const start = 10 + content.readUInt16LE(8);
  const header = content.toString("latin1", 10, start);
  const name = header.match(/'descr': '([^']*)'/)[1];
  if (!(name in DTYPES)) throw new Error(`the self-test has values of the dtype ${name}, which this script does not read`);
  const [Values, dtype] = DTYPES[name];
  const shape = header.match(/'shape': \(([^)]*)\)/)[1].split(",").filter((size) => size.trim()).map(Number);
  return { dtype, shape, values: new Values(new Uint8Array(content.subarray(start)).buffer) };
}

/** What the file notes: its manifest, and the arrays of its self-test. */
function notesOf(content) {
  const notes = {};
  for (const [number, value] of fields(content)) {
    if (number !== METADATA) continue;
    const entry = Object.fromEntries(fields(value));
    notes[entry[1].toString()] = entry[2].toString();
  }
  const arrays = {};
  for (const [name, bytes] of entries(Buffer.from(notes.lrpfx_self_test, "base64"))) {
    arrays[name.replace(/\.npy$/, "")] = arrayOf(bytes);
  }
  return [JSON.parse(notes.lrpfx), arrays];
}

/** The first rows of an array, which repeat if it has fewer. */
function rows({ dtype, shape, values }, size) {
  if (!shape.length) return { dtype, shape, values };
  const length = size * shape.slice(1).reduce((product, extent) => product * extent, 1);
  const filled = new values.constructor(length);
  for (let place = 0; place < length; place += values.length) {
    filled.set(values.subarray(0, Math.min(values.length, length - place)), place);
  }
  return { dtype, shape: [size, ...shape.slice(1)], values: filled };
}

const largest = (values) => values.reduce((found, value) => Math.max(found, Math.abs(value)), 0);
const norm = (values) => Math.sqrt(values.reduce((sum, value) => sum + value * value, 0));

const [path, runtime = "onnxruntime-web"] = process.argv.slice(2);
const ort = await import(runtime);
const content = readFileSync(path);
const [manifest, arrays] = notesOf(content);
const session = await ort.InferenceSession.create(content);
const found = Object.fromEntries(Object.keys(manifest.results).map((name) => [name, [0, 0]]));
for (const size of manifest.self_test) {
  const given = {};
  for (const name of Object.keys(manifest.arguments)) {
    const { dtype, shape, values } = rows(arrays[`in.${name}`], size);
    given[name] = new ort.Tensor(dtype, values, shape);
  }
  const results = await session.run(given);
  for (const name of Object.keys(found)) {
    const expected = rows(arrays[`${size}.out.${name}`] ?? arrays[`out.${name}`], size).values;
    const whole = rows(arrays[name === "balance" ? "out.output" : `out.${name}`], manifest.self_test[0]).values;
    const changes = Float64Array.from(expected, (value, place) => {
      const change = Math.abs(Number(value) - Number(results[name].data[place]));
      return Number.isNaN(change) ? Infinity : change;
    });
    const scale = Float64Array.from(whole, Number);
    const differences = [largest(changes) / (largest(scale) || 1), norm(changes) / (norm(scale) || 1)];
    found[name] = differences.map((value, place) => Math.max(value, found[name][place]));
  }
}
for (const [name, [difference]] of Object.entries(found)) console.log(`${name}: ${difference.toExponential(1)}`);
process.exitCode = Number(Object.values(found).some(([, difference]) => difference > manifest.tolerance));
