/** How the gateway's page shows the text of an image, and the fields of a document. */

import * as api from "../../api.js";
import { boxed } from "../../boxes.js";
import { counted, errorBlock, make, percent } from "../../dom.js";

/** @type {import("../../api.js").TaskPage} */
export const read = {
  title: "Read text",
  again: "Read again",
  show: (answer, file) => ({
    verdict: counted(answer.lines.length, "line"),
    found: [...boxed(file, [linesOf(answer), ...barcodesOf(answer)]), downloads(answer, file)],
  }),
};

/** @type {import("../../api.js").TaskPage} */
export const waybill = {
  title: "Read a waybill",
  again: "Read again",
  show(answer, file) {
    const present = answer.fields.filter(({ value }) => value !== null);
    const entries = answer.fields.map((field) => ({ corners: onFirstPage(field), label: `${field.name}: ${field.value}`, content: [...pageOf(answer, field), ...fieldContent(field)] }));
    return {
      verdict: [make("strong", {}, `${present.length} of ${answer.fields.length}`), " fields found"],
      found: [...boxed(file, [{ title: "Fields", entries }, linesOf(answer), ...barcodesOf(answer)]), downloads(answer, file)],
    };
  },
};

function linesOf(answer) {
  const entries = answer.lines.map((line) => ({
    corners: onFirstPage(line),
    label: `Line: ${line.text}`,
    content: [...pageOf(answer, line), make("span", {}, line.text), make("span", { class: "score" }, percent(line.confidence))],
  }));
  return { title: "Lines", entries };
}

function barcodesOf(answer) {
  const entries = answer.barcodes.map((code) => ({
    corners: onFirstPage(code),
    label: `${code.symbology}: ${code.text}`,
    content: [...pageOf(answer, code), make("small", {}, code.symbology), make("span", {}, code.text)],
  }));
  return entries.length ? [{ title: "Barcodes", entries }] : [];
}

/** The picture shows the first page. */
const onFirstPage = ({ page, box }) => (page === 1 ? box : null);

/** Name the page of an entry, where there are several. */
function pageOf(answer, { page }) {
  return answer.pages.length > 1 ? [make("small", {}, `page ${page}`)] : [];
}

function downloads(answer, file) {
  const name = (file.name ?? "image").replace(/\.\w+$/, "");
  const offer = (label, ending, content) => {
    const button = make("button", { type: "button", class: "copy" }, label);
    button.addEventListener("click", async () => {
      try {
        const url = URL.createObjectURL(await content());
        make("a", { href: url, download: `${name}.${ending}` }).click();
        setTimeout(() => URL.revokeObjectURL(url), 60_000);
      } catch (error) {
        button.replaceWith(errorBlock(error));
      }
    });
    return button;
  };
  const json = offer("JSON", "json", () => new Blob([JSON.stringify(answer, null, 2)], { type: "application/json" }));
  const pdf = answer.pages.length ? [" ", offer("Searchable PDF", "pdf", () => api.searchable(file))] : [];
  return make("p", { class: "note" }, "Download ", json, ...pdf);
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
