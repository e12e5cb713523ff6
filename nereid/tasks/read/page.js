/** How the gateway's page shows the text of an image, and the fields of a document. */

import { boxed } from "../../boxes.js";
import { counted, make, percent } from "../../dom.js";

/** @type {import("../../api.js").TaskPage} */
export const read = {
  title: "Read text",
  again: "Read again",
  show: (answer, file) => ({
    verdict: counted(answer.lines.length, "line"),
    found: boxed(file, [linesOf(answer), ...barcodesOf(answer)]),
  }),
};

/** @type {import("../../api.js").TaskPage} */
export const waybill = {
  title: "Read a waybill",
  again: "Read again",
  show(answer, file) {
    const present = answer.fields.filter(({ value }) => value !== null);
    const entries = answer.fields.map((field) => ({ corners: field.box, label: `${field.name}: ${field.value}`, content: fieldContent(field) }));
    return {
      verdict: [make("strong", {}, `${present.length} of ${answer.fields.length}`), " fields found"],
      found: boxed(file, [{ title: "Fields", entries }, linesOf(answer), ...barcodesOf(answer)]),
    };
  },
};

function linesOf(answer) {
  const entries = answer.lines.map(({ text, confidence, box }) => ({
    corners: box,
    label: `Line: ${text}`,
    content: [make("span", {}, text), make("span", { class: "score" }, percent(confidence))],
  }));
  return { title: "Lines", entries };
}

function barcodesOf(answer) {
  const entries = answer.barcodes.map(({ text, symbology, box }) => ({
    corners: box,
    label: `${symbology}: ${text}`,
    content: [make("small", {}, symbology), make("span", {}, text)],
  }));
  return entries.length ? [{ title: "Barcodes", entries }] : [];
}

function fieldContent({ name, value, confidence, valid, corrected, proof, carrier, certain, candidates }) {
  const title = make("small", {}, name);
  if (value === null) return [title, make("span", { class: "badge" }, "not found")];
  const checked = valid === null ? [] : [make("span", { class: "badge", "data-valid": String(valid) }, valid ? "checksum right" : "checksum wrong")];
  const changes = corrected.map(({ from, to, position }) => make("span", { class: "badge" }, `${from} → ${to} at ${position + 1}`));
  const known = [certain ? "certain" : "", carrier, proof, ...candidates.slice(1).map((other) => `or ${other}`)];
  const proven = make("small", {}, known.filter(Boolean).join(", "));
  return [title, make("strong", {}, value), make("span", { class: "score" }, percent(confidence)), ...checked, ...changes, proven];
}
