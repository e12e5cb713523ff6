/** Elements that all panels share. All text becomes text nodes: names and messages are data. */

const SLOTS = 5;
/** @type {Map<string, number>} */
const slots = new Map();

/**
 * Return the element of index.html with this id.
 * @returns {any}
 */
export const byId = (/** @type {string} */ id) => document.getElementById(id);

/**
 * Make an element.
 * @param {string} tag
 * @param {Record<string, string | number | boolean | EventListener>} [attributes] `onclick` and the like are functions
 * @param {...(Node | string)} children
 * @returns {any}
 */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else if (typeof value === "boolean") element.toggleAttribute(name, value);
    else element.setAttribute(name, String(value));
  }
  element.append(...children);
  return element;
}

/** Make an element of SVG. */
export function makeSvg(/** @type {string} */ tag, /** @type {Record<string, string>} */ attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

/**
 * Show a file in an `img` element; `done` gets whether the browser can show it.
 * @param {HTMLImageElement} image
 * @param {Blob} file
 * @param {(isShown: boolean) => void} done
 */
export function showFile(image, file, done) {
  const url = URL.createObjectURL(file);
  const end = (isShown) => {
    URL.revokeObjectURL(url);
    done(isShown);
  };
  image.onload = () => end(true);
  image.onerror = () => end(false);
  image.src = url;
}

/** Format a share in 0..1: `95.3 %`, `0.31 %`. */
export function percent(/** @type {number} */ share) {
  if (share > 0 && share < 0.0001) return "<\u00a00.01\u00a0%";
  return `${(100 * share).toFixed(share !== 0 && share < 0.01 ? 2 : 1)}\u00a0%`;
}

/** Format a duration in milliseconds: `9.8`, `123`; a missing value is a dash. */
export function milliseconds(/** @type {?number} */ value) {
  if (value === null || value === undefined) return "–";
  return value < 0.1 ? value.toFixed(2) : value < 100 ? value.toFixed(1) : value.toFixed(0);
}

/** Assign colours to the variants, in the order of the route. */
export function colourVariants(/** @type {string[]} */ names) {
  for (const name of names) if (!slots.has(name)) slots.set(name, slots.size % SLOTS);
}

function coloured(element, name) {
  colourVariants([name]);
  element.style.setProperty("--hue", `var(--slot-${slots.get(name)})`);
  return element;
}

/** Make a variant's name in its colour, which is the same in every panel. */
export function variantName(/** @type {string} */ name) {
  return coloured(make("span", { class: "variant" }, name), name);
}

/** Make the note with the model and the version of a variant. */
export function modelNote(/** @type {string} */ model, /** @type {string} */ version) {
  return make("span", { class: "note" }, `${model}, version ${version}`);
}

/** Make a bar for a share in 0..1; hidden from screen readers, because the number is next to it. */
export function bar(/** @type {number} */ share, /** @type {string} */ variant = "") {
  const track = make("span", { class: "track", "aria-hidden": "true" }, make("span", { class: "fill" }));
  if (variant) coloured(track, variant);
  track.style.setProperty("--share", String(Math.min(1, Math.max(0, share))));
  return track;
}

/** Count what was found: `3 lines`, `No line found.` */
export function counted(/** @type {number} */ count, /** @type {string} */ noun) {
  if (!count) return [`No ${noun} found.`];
  return [make("strong", {}, String(count)), ` ${noun}${count === 1 ? "" : "s"}`];
}

/** Make a button that copies; if the page has no access to the clipboard, the button selects the text. */
export function copyButton(/** @type {HTMLElement} */ source, /** @type {string} */ name) {
  const button = make("button", { type: "button", class: "copy", "aria-label": `Copy ${name}` }, "Copy");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(source.textContent ?? "");
      button.textContent = "Copied";
    } catch {
      getSelection()?.selectAllChildren(source);
      button.textContent = "Selected";
    }
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
  return button;
}

/** Make the block of an error: code, message, retry time, and the request id in the log. */
export function errorBlock(/** @type {any} */ error) {
  const code = make("code", { class: "code-name" }, error.code ?? "page");
  const lines = [make("p", {}, code, ` ${error.message}`)];
  if (error.retryAfterS) lines.push(make("p", {}, `Retry after ${error.retryAfterS} s.`));
  if (error.status === 401) lines.push(make("p", {}, "Enter a key under “Key” at the top of the page."));
  if (error.requestId) {
    const id = make("code", {}, error.requestId);
    lines.push(make("p", { class: "note" }, "request ", id, " ", copyButton(id, "the request id")));
  }
  return make("div", { class: "error" }, ...lines);
}
