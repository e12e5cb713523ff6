/** How the gateway's page shows an embedding: the number of dimensions, and a bar for each component. */

import { make, makeSvg } from "../../dom.js";

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
  const bars = vector.map((number, place) => `M${place + 0.5} 0V${(-number / largest).toFixed(3)}`).join("");
  const label = `${vector.length} components, the largest ${largest.toPrecision(3)}`;
  const size = { viewBox: `0 -1 ${vector.length} 2`, preserveAspectRatio: "none", width: "100%", height: "96" };
  const picture = makeSvg("svg", { role: "img", "aria-label": label, ...size });
  picture.append(makeSvg("path", { d: bars, stroke: "currentColor" }));
  return make("figure", {}, picture);
}
