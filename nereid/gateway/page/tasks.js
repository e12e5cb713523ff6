/** The tasks of a gateway: their names, and how the answer to each is shown. */

import { boxed } from "./boxes.js";
import { bars, make, percent } from "./dom.js";

/** @typedef {{verdict: (Node | string)[], found: HTMLElement[]}} Shown */
/**
 * `title` is the tab, `again` the button that repeats a request, `show` makes the answer for a file.
 * @typedef {{title: string, again: string, show: (answer: any, file: Blob) => Shown}} Task
 */

/** @type {Record<string, Task>} */
export const TASKS = {
  classify: { title: "Classify", again: "Classify again", show: showClasses },
  read: { title: "Read text", again: "Read again", show: showLines },
  waybill: { title: "Read a waybill", again: "Read again", show: showFields },
  detect: { title: "Find objects", again: "Search again", show: showObjects },
};

function showClasses(answer) {
  const [best] = answer.predictions;
  return {
    verdict: [make("strong", {}, best.label), ` ${percent(best.score)}`],
    found: [bars(answer.predictions, answer.variant)],
  };
}

function showLines(answer, file) {
  return { verdict: counted(answer.lines.length, "line"), found: boxed(file, [linesOf(answer), ...barcodesOf(answer)]) };
}

function showFields(answer, file) {
  const present = answer.fields.filter(({ value }) => value !== null);
  const entries = answer.fields.map((field) => ({ corners: field.box, label: `${field.name}: ${field.value}`, content: fieldContent(field) }));
  return {
    verdict: [make("strong", {}, `${present.length} of ${answer.fields.length}`), " fields found"],
    found: boxed(file, [{ title: "Fields", entries }, linesOf(answer), ...barcodesOf(answer)]),
  };
}

function showObjects(answer, file) {
  const entries = answer.objects.map(({ label, score, box: [left, top, right, bottom] }) => ({
    corners: [[left, top], [right, top], [right, bottom], [left, bottom]],
    label: `${label}, ${percent(score)}`,
    content: [make("span", {}, label), make("span", { class: "score" }, percent(score))],
  }));
  return { verdict: counted(entries.length, "object"), found: boxed(file, [{ title: "Objects", entries }]) };
}

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

function counted(count, noun) {
  if (!count) return [`No ${noun} found.`];
  return [make("strong", {}, String(count)), ` ${noun}${count === 1 ? "" : "s"}`];
}
