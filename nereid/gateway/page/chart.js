/** Line charts of the last minute, as SVG. */

import { make, makeSvg } from "./dom.js";

const HEIGHT = 40;

/** @typedef {{name: string, values: (?number)[]}} Line */

/** A chart with its heading; `draw` shows new values, one a second, the newest last. */
export class Chart {
  /**
   * @param {string} title
   * @param {(value: ?number) => string} format
   */
  constructor(title, format) {
    this.title = title;
    this.format = format;
    /** @type {Line[]} */
    this.lines = [];
    /** @type {?number} */
    this.pointed = null;
    this.readout = make("span", { class: "readout" });
    this.top = make("span", { class: "axis", "aria-hidden": "true" });
    this.svg = makeSvg("svg", { viewBox: `0 0 59 ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
    this.element = make(
      "figure",
      { class: "chart" },
      make("figcaption", {}, make("span", {}, title), this.readout),
      make("div", { class: "plot" }, this.svg, this.top),
    );
    this.svg.addEventListener("pointermove", (event) => {
      const box = this.svg.getBoundingClientRect();
      const seconds = (this.lines[0]?.values.length ?? 1) - 1;
      this.pointed = Math.round((seconds * (event.clientX - box.left)) / box.width);
      this.redraw();
    });
    this.svg.addEventListener("pointerleave", () => {
      this.pointed = null;
      this.redraw();
    });
  }

  draw(lines) {
    this.lines = lines;
    this.redraw();
  }

  redraw() {
    const highest = ceiling(Math.max(0, ...this.lines.flatMap(({ values }) => values.map((value) => value ?? 0))));
    const seconds = Math.max(1, (this.lines[0]?.values.length ?? 1) - 1);
    this.top.textContent = String(highest);
    this.svg.setAttribute("viewBox", `0 0 ${seconds} ${HEIGHT}`);
    const paths = this.lines.map(({ name, values }) =>
      makeSvg("path", { d: path(values, highest), "data-line": name, "vector-effect": "non-scaling-stroke" }),
    );
    if (this.pointed !== null) {
      const d = `M${this.pointed} 0V${HEIGHT}`;
      paths.push(makeSvg("path", { d, "data-line": "pointer", "vector-effect": "non-scaling-stroke" }));
    }
    this.svg.replaceChildren(...paths);
    this.showValues(seconds);
  }

  /** Show the values of the second under the pointer, or of the newest second with values. */
  showValues(seconds) {
    const newest = this.lines[0]?.values.findLastIndex((value) => value !== null) ?? -1;
    const at = this.pointed ?? newest;
    const values = this.lines.map(({ name, values }) => {
      const value = this.format(values[at] ?? null);
      return make("span", { "data-line": name }, name, " ", make("strong", {}, value));
    });
    const age = at < 0 || at === seconds ? [] : [make("span", { class: "note" }, `${seconds - at} s ago`)];
    this.readout.replaceChildren(...age, ...values);
    const text = this.lines.map(({ name, values }) => `${name} ${this.format(values[newest] ?? null)}`.trim());
    this.svg.setAttribute("aria-label", `${this.title} over ${seconds + 1} s, last ${text.join(", ")}`);
  }
}

/** Return a path with gaps for missing values; a value between gaps is a dot. */
function path(values, highest) {
  let isDrawing = false;
  const steps = values.map((value, second) => {
    if (value === null || value === undefined) {
      isDrawing = false;
      return "";
    }
    const point = `${second} ${(HEIGHT - (HEIGHT * value) / highest).toFixed(2)}`;
    const step = isDrawing ? `L${point}` : `M${point}h0`;
    isDrawing = true;
    return step;
  });
  return steps.join("");
}

/** Return the smallest of 1, 2, 5, 10, 20, 50 … that is not below the value. */
function ceiling(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => Number((step * power).toPrecision(1))).find((step) => step >= value) ?? value;
}
