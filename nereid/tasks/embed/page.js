/** How the gateway's page shows an embedding: the number of dimensions, and a bar for each component. */

import { make } from "../../dom.js";

const SVG = "http://www.w3.org/2000/svg";

/** @type {import("../../api.js").TaskPage} */
export const embed = {
  title: "Embed",
  again: "Embed again",
  show({ embedding }) {
    return { verdict: [make("strong", {}, String(embedding.length)), " dimensions"], found: [plot(embedding)] };
  },
};

/** Make the plot of a vector: positive components upwards, negative ones downwards, the largest at full height. */
function plot(vector) {
  const largest = vector.reduce((most, number) => Math.max(most, Math.abs(number)), 0) || 1;
  const bars = document.createElementNS(SVG, "path");
  bars.setAttribute("d", vector.map((number, place) => `M${place + 0.5} 0V${(-number / largest).toFixed(3)}`).join(""));
  bars.setAttribute("stroke", "currentColor");
  const picture = document.createElementNS(SVG, "svg");
  const attributes = { role: "img", viewBox: `0 -1 ${vector.length} 2`, preserveAspectRatio: "none", width: "100%", height: "96" };
  for (const [name, value] of Object.entries(attributes)) picture.setAttribute(name, value);
  picture.setAttribute("aria-label", `${vector.length} components, the largest ${largest.toPrecision(3)}`);
  picture.append(bars);
  return make("figure", {}, picture);
}
