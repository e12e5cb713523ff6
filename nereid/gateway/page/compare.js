/** Comparison of one image by every variant of the route. */

import * as api from "./api.js";
import { bar, byId, errorBlock, make, milliseconds, modelNote, variantName } from "./dom.js";

/** @typedef {{variant: api.RouteVariant, element: HTMLElement, answer?: api.Answer, times_ms: number[]}} Column */

/** @returns {any} the comparison of the chosen task; the panel is hidden for a task without one */
const comparison = () => api.usedTask().comparison;

// One latency is not enough. The variants take turns, so that a moment of load affects all of them.
const ROUNDS = 3;

/** Compare on request; a new image or another model empties the table. */
export function startCompare() {
  /** @type {?Blob} */
  let image = null;
  /** @type {api.RouteVariant[]} */
  let variants = [];
  let why = "";
  let pending = new AbortController();

  function refresh() {
    byId("compare-all").disabled = !image || !variants.length;
    byId("compare-why").textContent =
      why || (image ? (comparison()?.hint ?? "") : "Choose an image first.");
  }

  async function compare() {
    clear();
    pending = new AbortController();
    const { signal } = pending;
    const file = image;
    if (!file) return;
    /** @type {Column[]} */
    const columns = variants.map((variant) => ({ variant, element: column(variant), times_ms: [] }));
    byId("columns").replaceChildren(...columns.map(({ element }) => element));
    for (const each of columns) await fill(each, columns, file, signal);
    if (signal.aborted) return;
    showAgreement(columns);
    for (let round = 1; round < ROUNDS; round += 1) {
      for (const each of columns) await time(each, columns, file, signal);
    }
  }

  function clear() {
    pending.abort();
    byId("agreement").replaceChildren();
    byId("columns").replaceChildren();
    byId("compare-unit").replaceChildren();
  }

  byId("compare-all").addEventListener("click", compare);
  refresh();
  return {
    setImage(file) {
      image = file;
      clear();
      refresh();
    },
    setRoute(route, error) {
      if (!route) clear();
      variants = route?.variants ?? [];
      why = error ? `Not available: ${error.message}` : "";
      refresh();
    },
  };
}

function column({ name, model, version }) {
  const heading = make("h3", {}, variantName(name), modelNote(model, version));
  return make("article", { class: "result" }, heading, make("p", { class: "note" }, "waiting …"));
}

/** @typedef {(mine: Column, columns: Column[], file: Blob, signal: AbortSignal) => Promise<void>} Step */

/** Send to one variant; an error is shown in its column. @type {Step} */
async function fill(mine, columns, file, signal) {
  const heading = mine.element.firstChild ?? "";
  try {
    mine.answer = await send(mine, file, signal);
  } catch (error) {
    if (!signal.aborted) mine.element.replaceChildren(heading, errorBlock(error));
    return;
  }
  const first = columns[0].answer;
  const shown = comparison().show(mine.answer, mine.variant.name, first === mine.answer ? undefined : first);
  mine.element.replaceChildren(heading, ...shown, make("p", { class: "latency" }));
  showLatencies(columns);
}

/** Repeat the request to measure the time; a failure here changes nothing on the page. @type {Step} */
async function time(mine, columns, file, signal) {
  if (!mine.answer || signal.aborted) return;
  await send(mine, file, signal).then(() => showLatencies(columns), () => {});
}

async function send(mine, file, signal) {
  const options = { variant: mine.variant.name, ...(api.usedTask().hasTopK ? { top_k: 5 } : {}) };
  const answer = await api.predict(file, options, signal);
  mine.times_ms.push(answer.timings_ms.inference ?? answer.timings_ms.total);
  return answer;
}

function median(values) {
  return [...values].sort((left, right) => left - right)[values.length >> 1];
}

/** Show the median latencies so far, relative to the slowest. */
function showLatencies(columns) {
  const answered = columns.filter(({ times_ms }) => times_ms.length);
  const slowest = Math.max(...answered.map(({ times_ms }) => median(times_ms)));
  for (const { variant, element, times_ms } of answered) {
    const middle = median(times_ms);
    const count = times_ms.length > 1 ? `, median of ${times_ms.length}` : "";
    const text = make("span", {}, make("strong", {}, `${milliseconds(middle)} ms`), ` inference${count}`);
    element.querySelector(".latency")?.replaceChildren(text, bar(middle / slowest, variant.name));
  }
}

/** Show whether the best of all variants is the same, and mark those that differ from the first. */
function showAgreement(columns) {
  const answered = columns.filter(({ answer }) => answer);
  const best = answered.map(({ answer }) => comparison().best(answer));
  const isSame = best.map(({ id }) => id === best[0].id);
  const agree = best.length > 1 && isSame.every(Boolean);
  const classes = answered.map(({ variant }, place) => `${variant.name}: ${best[place].label}`).join(", ");
  const failed = columns.length - best.length;
  answered.forEach(({ element }, place) => (element.dataset.agrees = String(isSame[place])));
  byId("agreement").dataset.agrees = String(agree);
  byId("agreement").textContent = agree
    ? `${best.length === 2 ? "Both" : `All ${best.length}`} agree: ${best[0].label}.`
    : `${best.length > 1 ? "No agreement. " : ""}${classes || "No variant answered"}.`;
  if (failed && best.length) byId("agreement").append(` ${failed} did not answer.`);
  if (columns[0].answer && best.length > 1) {
    byId("compare-unit").textContent = comparison().unit(columns[0].variant.name);
  }
}
