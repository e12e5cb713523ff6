/** One image, every variant of the route, side by side. */

import * as api from "./api.js";
import { bar, bars, byId, errorBlock, make, milliseconds, pipeline, variantName } from "./dom.js";

/** @typedef {{variant: api.RouteVariant, element: HTMLElement, answer?: api.Answer, times_ms: number[]}} Column */

// One request says little about a latency; interleaved, a busy moment meets all variants.
const ROUNDS = 3;

/** Compare on request; a new image empties the table. */
export function startCompare() {
  /** @type {?Blob} */
  let image = null;
  /** @type {api.RouteVariant[]} */
  let variants = [];
  let why = "";
  let asking = new AbortController();

  function refresh() {
    byId("compare-all").disabled = !image || !variants.length;
    byId("compare-why").textContent =
      why || (image ? "The same bytes for each, in turn, three times." : "Give an image first.");
  }

  async function compare() {
    asking.abort();
    asking = new AbortController();
    const { signal } = asking;
    const file = image;
    if (!file) return;
    /** @type {Column[]} */
    const columns = variants.map((variant) => ({ variant, element: column(variant), times_ms: [] }));
    clear();
    byId("columns").replaceChildren(...columns.map(({ element }) => element));
    for (const each of columns) await fill(each, columns, file, signal);
    if (signal.aborted) return;
    showAgreement(columns);
    for (let round = 1; round < ROUNDS; round += 1) {
      for (const each of columns) await time(each, columns, file, signal);
    }
  }

  function clear() {
    byId("agreement").replaceChildren();
    byId("columns").replaceChildren();
    byId("compare-unit").replaceChildren();
  }

  byId("compare-all").addEventListener("click", compare);
  refresh();
  return {
    setImage(file) {
      asking.abort();
      image = file;
      clear();
      refresh();
    },
    setRoute(route, error) {
      variants = route?.variants ?? [];
      why = error ? `Not possible here: ${error.message}` : "";
      refresh();
    },
  };
}

function column({ name, model, version }) {
  const heading = make("h3", {}, variantName(name), pipeline(model, version));
  return make("article", { class: "result" }, heading, make("p", { class: "note" }, "asking …"));
}

/** @typedef {(mine: Column, columns: Column[], file: Blob, signal: AbortSignal) => Promise<void>} Step */

/** Ask one variant; one that fails has its error in its own column. @type {Step} */
async function fill(mine, columns, file, signal) {
  const heading = mine.element.firstChild ?? "";
  try {
    mine.answer = await ask(mine, file, signal);
  } catch (error) {
    if (!signal.aborted) mine.element.replaceChildren(heading, errorBlock(error));
    return;
  }
  const first = columns[0].answer;
  const others = first && first !== mine.answer ? scores(first) : undefined;
  const [best] = mine.answer.predictions;
  mine.element.replaceChildren(
    heading,
    make("p", { class: "verdict" }, make("strong", {}, best.label)),
    bars(mine.answer.predictions, mine.variant.name, others),
    make("p", { class: "latency" }),
  );
  showLatencies(columns);
}

/** Ask once more, for the time; what fails now changes nothing of what is shown. @type {Step} */
async function time(mine, columns, file, signal) {
  if (!mine.answer || signal.aborted) return;
  await ask(mine, file, signal).then(() => showLatencies(columns), () => {});
}

async function ask(mine, file, signal) {
  const answer = await api.predict(file, { variant: mine.variant.name, top_k: 5 }, signal);
  mine.times_ms.push(answer.timings_ms.inference ?? answer.timings_ms.total);
  return answer;
}

const scores = ({ predictions }) => new Map(predictions.map(({ index, score }) => [index, score]));

function median(values) {
  return [...values].sort((left, right) => left - right)[values.length >> 1];
}

/** The median latencies so far, against the slowest. */
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

/** Say whether the variants that answered have the same best class, and mark those that differ from the first. */
function showAgreement(columns) {
  const answered = columns.filter(({ answer }) => answer);
  const best = answered.map(({ answer }) => answer.predictions[0]);
  const isSame = best.map(({ index }) => index === best[0].index);
  const agree = best.length > 1 && isSame.every(Boolean);
  const says = answered.map(({ variant }, place) => `${variant.name} says ${best[place].label}`).join(", ");
  const failed = columns.length - best.length;
  answered.forEach(({ element }, place) => (element.dataset.agrees = String(isSame[place])));
  byId("agreement").dataset.agrees = String(agree);
  byId("agreement").textContent = agree
    ? `${best.length === 2 ? "Both" : `All ${best.length}`} agree: ${best[0].label}.`
    : `${best.length > 1 ? "No agreement: " : ""}${says || "No variant answered"}.`;
  if (failed && best.length) byId("agreement").append(` ${failed} did not answer.`);
  if (columns[0].answer && best.length > 1) {
    byId("compare-unit").textContent = `Small figures: difference from ${columns[0].variant.name}, percentage points.`;
  }
}
