/** How the gateway's page shows the objects in an image. */

import { boxed } from "../../boxes.js";
import { counted, make, percent } from "../../dom.js";

/** @type {import("../../api.js").TaskPage} */
export const detect = {
  title: "Find objects",
  again: "Search again",
  show({ objects }, file) {
    const entries = objects.map(({ label, score, box: [left, top, right, bottom] }) => ({
      corners: [[left, top], [right, top], [right, bottom], [left, bottom]],
      label: `${label}, ${percent(score)}`,
      content: [make("span", {}, label), make("span", { class: "score" }, percent(score))],
    }));
    return { verdict: counted(entries.length, "object"), found: boxed(file, [{ title: "Objects", entries }]) };
  },
};
