/** Boxes over an image, and the list of their entries; each highlights the other. */

import { make, makeSvg, showFile } from "./dom.js";

const STEPS = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1 };

/** @typedef {[number, number]} Point */
/** @typedef {{corners: ?Point[], label: string, content: (Node | string)[]}} Entry `corners` are upright pixels */

/**
 * Make the picture of a file with boxes, and one list for each group of entries.
 * @param {Blob} file
 * @param {{title: string, entries: Entry[]}[]} groups
 * @returns {HTMLElement[]}
 */
export function boxed(file, groups) {
  const overlay = makeSvg("svg", { role: "listbox", "aria-label": "Boxes in the image", preserveAspectRatio: "none" });
  /** @type {Element[]} */
  const shapes = [];
  const lists = groups.map(({ title, entries }) => {
    const items = entries.map((entry) => {
      const item = make("li", { role: "option", "aria-selected": "false" }, ...entry.content);
      if (entry.corners) shapes.push(shapeOf(entry, item));
      return item;
    });
    const list = make("ol", { class: "found", role: "listbox", "aria-label": title }, ...items);
    rove(list, items);
    return make("section", {}, make("h3", {}, title), list);
  });
  overlay.append(...shapes);
  rove(overlay, shapes);
  return [picture(file, overlay), ...lists];
}

function picture(file, overlay) {
  const image = make("img", { alt: "The image with boxes" });
  const figure = make("figure", { class: "boxes" }, image, overlay);
  showFile(image, file, (isShown) => {
    if (isShown) overlay.setAttribute("viewBox", `0 0 ${image.naturalWidth} ${image.naturalHeight}`);
    else figure.replaceChildren(make("p", { class: "note" }, "This browser cannot show the image."));
  });
  return figure;
}

/** Make the box of an entry, linked with its item of the list. */
function shapeOf(/** @type {Entry} */ { corners, label }, item) {
  const points = (corners ?? []).map((point) => point.join(",")).join(" ");
  const shape = makeSvg("polygon", { points, role: "option", "aria-label": label, "aria-selected": "false" });
  const light = (isLit) => {
    for (const each of [shape, item]) {
      each.classList.toggle("lit", isLit);
      each.setAttribute("aria-selected", String(isLit));
    }
  };
  for (const each of [shape, item]) {
    for (const event of ["pointerenter", "focus"]) each.addEventListener(event, () => light(true));
    for (const event of ["pointerleave", "blur"]) {
      each.addEventListener(event, () => light([shape, item].includes(document.activeElement)));
    }
  }
  // Only within the list: the page must not move under the pointer.
  const reveal = () => (item.parentElement.scrollTop = item.offsetTop - item.parentElement.clientHeight / 2);
  shape.addEventListener("pointerenter", reveal);
  shape.addEventListener("focus", reveal);
  return shape;
}

/** Give a group one stop of the Tab key; arrows, Home and End move within it. */
export function rove(/** @type {Element} */ group, /** @type {any[]} */ elements) {
  elements.forEach((element, place) => element.setAttribute("tabindex", place ? "-1" : "0"));
  group.addEventListener("focusin", ({ target }) => {
    for (const element of elements) element.setAttribute("tabindex", element === target ? "0" : "-1");
  });
  group.addEventListener("keydown", (/** @type {any} */ event) => {
    const place = elements.indexOf(event.target);
    const ends = { Home: 0, End: elements.length - 1 };
    const next = ends[event.key] ?? (event.key in STEPS ? place + STEPS[event.key] : -1);
    if (place < 0 || !(event.key in STEPS || event.key in ends)) return;
    event.preventDefault();
    elements[next]?.focus();
  });
}
