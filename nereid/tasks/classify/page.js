/** How the gateway's page shows the classes of an image, and compares those of several variants. */

import { bar, make, percent } from "../../dom.js";

/** @typedef {{label: string, index: number, score: number}} Label */

/** @type {import("../../api.js").TaskPage} */
export const classify = {
  title: "Classify",
  again: "Classify again",
  hasTopK: true,
  isPreviewed: true,
  show({ predictions, variant }) {
    const [best] = predictions;
    return { verdict: [make("strong", {}, best.label), ` ${percent(best.score)}`], found: [bars(predictions, variant)] };
  },
  comparison: {
    button: "Classify with every variant",
    hint: "Each variant classifies the same image three times, in turn.",
    unit: (first) => `Small figures: difference from ${first} in percentage points.`,
    best: ({ predictions: [{ index, label }] }) => ({ id: index, label }),
    show({ predictions }, variant, first) {
      const others = first && new Map(first.predictions.map(({ index, score }) => [index, score]));
      return [make("p", { class: "verdict" }, make("strong", {}, predictions[0].label)), bars(predictions, variant, others)];
    },
  },
};

/**
 * Make the list of the best classes, with bars.
 * @param {Label[]} labels
 * @param {string} variant that has the colour of the bars
 * @param {Map<number, number>} [others] scores of another variant by class, to show the difference
 */
function bars(labels, variant, others) {
  const rows = labels.map(({ label, index, score }) => {
    const other = others?.get(index);
    const difference = other === undefined ? "" : signed(100 * (score - other));
    return make(
      "li",
      {},
      make("span", { class: "label", title: `class ${index}` }, label),
      make("span", { class: "score" }, percent(score), ...(difference ? [make("small", {}, ` ${difference}`)] : [])),
      bar(score, variant),
    );
  });
  return make("ol", { class: "bars" }, ...rows);
}

function signed(points) {
  const text = Math.abs(points).toFixed(2);
  return Number(text) === 0 ? "0.00" : (points < 0 ? "−" : "+") + text;
}
