// Classify an image from Node.js 18 or later, or from Deno: KServe v2 over HTTP, without a package.
//
//   node clients/javascript.mjs IMAGE [HOST:PORT]

import { readFile } from "node:fs/promises";

const [image, url = "localhost:8000"] = process.argv.slice(2);
const file = await readFile(image);

// A BYTES element is its length in four bytes, lowest first, and then the bytes of the file.
const length = Buffer.alloc(4);
length.writeUInt32LE(file.length);

const header = Buffer.from(
  JSON.stringify({
    inputs: [
      {
        name: "image",
        shape: [1, 1],
        datatype: "BYTES",
        parameters: { binary_data_size: length.length + file.length },
      },
    ],
    outputs: [{ name: "scores", parameters: { classification: 3 } }, { name: "variant" }],
  }),
);

const response = await fetch(`http://${url}/v2/models/classify/infer`, {
  method: "POST",
  headers: { "Inference-Header-Content-Length": String(header.length) },
  body: Buffer.concat([header, length, file]),
});
const body = await response.json();
if (!response.ok) {
  console.error(`error: ${response.status} ${body.error}`);
  process.exit(1);
}

const output = (name) => body.outputs.find((each) => each.name === name).data;
for (const best of output("scores")) {
  const [probability, index, label] = best.split(":");
  console.log(`${Number(probability).toFixed(3)} ${label} (class ${index}, variant ${output("variant")[0]})`);
}
