/** One image: the result of its task, the variant, the reason and the timings. */

import * as api from "./api.js";
import { byId, copyButton, errorBlock, make, milliseconds, showFile, variantName } from "./dom.js";

/** @type {Record<string, string>} */
const REASONS = {
  weight: "selected by weight",
  "route-key": "selected by the route key",
  variant: "requested by name",
  version: "requested by version",
  header: "selected by a header rule of the route",
  breaker: "because the selected variant is paused after failures",
  retry: "because the selected variant was not available",
  answer: "because no variant was available: a configured answer",
};

/**
 * Take images from the file dialog, drops, the clipboard and the samples; send each immediately.
 * @param {{onImage: (file: Blob) => void}} panels
 */
export function startImage({ onImage }) {
  /** @type {?{file: Blob, name: string}} */
  let image = null;
  let pending = new AbortController();
  let isRejected = false;
  byId("curl-title").after(copyButton(byId("curl"), "the command"));

  function take(file, name) {
    if (!file) return;
    image = { file, name };
    showImage(file, name);
    byId("again").disabled = false;
    onImage(file);
    send();
  }

  async function send() {
    if (!image) return;
    pending.abort();
    pending = new AbortController();
    const { signal } = pending;
    const options = chosenOptions();
    const { file } = image;
    const task = api.usedTask();
    byId("result").setAttribute("aria-busy", "true");
    byId("error").replaceChildren();
    byId("curl").textContent = curl(image.name, options);
    byId("reproduce").hidden = false;
    const begin = performance.now();
    isRejected = false;
    showPreview(file, signal);
    try {
      const answer = await api.predict(file, options, signal);
      showAnswer(answer, task.show(answer, file), performance.now() - begin);
    } catch (error) {
      if (!signal.aborted) showError(error);
      isRejected = error.status === 401 || error.status === 403;
    } finally {
      if (!signal.aborted) byId("result").setAttribute("aria-busy", "false");
    }
  }

  async function takeSample(sample) {
    try {
      take(await api.download(sample.url), sample.url.split("/").pop() ?? sample.name);
    } catch (error) {
      showError(error);
    }
  }

  listen(take);
  byId("options").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  showSamples(takeSample);
  return {
    setRoute: offerVariants,
    /** Show what belongs to another task or model, and nothing of the present one. */
    setModel() {
      byId("verdict").replaceChildren();
      if (image) byId("answer").replaceChildren();
      byId("seen").hidden = true;
      showSamples(takeSample);
      send();
    },
    /** Repeat a request that was rejected for its key. */
    setAccess(maySee) {
      if (isRejected && maySee) send();
    },
  };
}

/** Receive files from the dialog, from drops anywhere on the page, and from the clipboard. */
function listen(/** @type {(file: ?Blob, name: string) => void} */ take) {
  const first = (data) => {
    const file = data?.files[0];
    if (file) take(file, file.name);
    return Boolean(file);
  };
  const file = byId("file");
  byId("drop").addEventListener("click", () => file.click());
  file.addEventListener("change", () => {
    if (file.files[0]) take(file.files[0], file.files[0].name);
    file.value = "";
  });
  addEventListener("paste", (event) => {
    if (first(event.clipboardData)) event.preventDefault();
  });
  addEventListener("dragover", (event) => {
    if (!event.dataTransfer?.types.includes("Files")) return;
    event.preventDefault();
    byId("drop").classList.add("over");
  });
  addEventListener("dragleave", (event) => {
    if (!event.relatedTarget) byId("drop").classList.remove("over");
  });
  addEventListener("drop", (event) => {
    byId("drop").classList.remove("over");
    if (first(event.dataTransfer)) event.preventDefault();
  });
}

/** @returns {api.Options} */
function chosenOptions() {
  const options = { variant: byId("variant").value, route_key: byId("route-key").value };
  return api.usedTask().hasTopK ? { top_k: byId("top-k").value, ...options } : options;
}

function showImage(file, name) {
  const thumbnail = byId("thumbnail");
  showFile(thumbnail, file, (isShown) => {
    thumbnail.hidden = !isShown;
    byId("drop-icon").toggleAttribute("hidden", isShown);
  });
  thumbnail.alt = `The image ${name}`;
  byId("drop-label").textContent = name;
  byId("drop-hint").textContent = `${size(file.size)} · choose, drop or paste another`;
}

/** Show what the network sees of an image; a gateway without the repository does not know it. */
async function showPreview(file, signal) {
  const picture = api.usedTask().isPreviewed ? await api.preview(file).catch(() => null) : null;
  if (signal.aborted) return;
  byId("seen").hidden = !picture;
  if (picture) showFile(byId("seen-image"), picture, () => {});
}

function size(bytes) {
  if (bytes < 1000) return `${bytes} B`;
  return bytes < 1e6 ? `${(bytes / 1e3).toFixed(1)} kB` : `${(bytes / 1e6).toFixed(1)} MB`;
}

function showError(error) {
  byId("verdict").replaceChildren();
  byId("answer").replaceChildren();
  byId("error").replaceChildren(errorBlock(error));
  byId("result").scrollIntoView({ block: "nearest" });
}

function showAnswer(answer, /** @type {api.Shown} */ { verdict, found }, elapsedMs) {
  const source = answer.variant ? variantName(answer.variant) : make("strong", {}, answer.model);
  const id = make("code", {}, answer.request_id);
  byId("verdict").replaceChildren(...verdict);
  byId("answer").replaceChildren(
    ...found,
    make("p", { class: "source" }, source, ` answered, ${reason(answer)}.`),
    timings(answer.timings_ms, elapsedMs),
    make(
      "dl",
      { class: "details" },
      ...detail("model", answer.model),
      ...detail("model version", answer.version),
      ...detail("request", id, " ", copyButton(id, "the request id")),
    ),
  );
  byId("result").scrollIntoView({ block: "nearest" });
}

function reason(answer) {
  if (!answer.variant) return "without a route";
  return REASONS[answer.reason] ?? `reason “${answer.reason}”`;
}

function detail(term, /** @type {(Node | string)[]} */ ...children) {
  return [make("dt", {}, term), make("dd", {}, ...children)];
}

/** Show the gateway's stages, the rest of its total, and the time measured by the browser. */
function timings(/** @type {Record<string, number>} */ { total, ...stages }, elapsedMs) {
  const rest = total - Object.values(stages).reduce((sum, each) => sum + each, 0);
  const parts = Object.entries(rest > 0.05 ? { ...stages, other: rest } : stages);
  const text = parts.map(([name, value]) => `${name} ${milliseconds(value)} ms`).join(", ");
  const stack = make("div", { class: "stack", role: "img", "aria-label": `Stages: ${text}` });
  const legend = make("ul", { class: "legend" });
  for (const [name, value] of parts) {
    const part = make("span", { "data-stage": name });
    part.style.setProperty("flex-grow", String(Math.max(value, 0)));
    stack.append(part);
    legend.append(make("li", { "data-stage": name }, `${name} `, make("strong", {}, milliseconds(value))));
  }
  const caption = make(
    "figcaption",
    {},
    make("strong", {}, `${milliseconds(total)} ms`),
    ` in the gateway, ${milliseconds(elapsedMs)} ms in this browser`,
  );
  return make("figure", { class: "timings" }, caption, stack, legend);
}

/** Return the command that sends the same request; the key stays a variable of the shell. */
function curl(name, options) {
  const lines = [`curl --data-binary ${quote(`@${name}`)}`];
  if (api.storedKey()) lines.push('-H "Authorization: Bearer $NEREID_KEY"');
  return [...lines, quote(api.predictAddress(options).href)].join(" \\\n  ");
}

/** Quote a word for a POSIX shell, if necessary. */
function quote(word) {
  if (/^[\w@%+=:,./-]+$/.test(word)) return word;
  return `'${word.replaceAll("'", `'\\''`)}'`;
}

/** @type {?Promise<api.Sample[]>} */
let samples = null;

/** Offer the samples that suit the task. */
async function showSamples(/** @type {(sample: api.Sample) => void} */ take) {
  samples ??= api.samples().catch(() => []);
  const task = api.usedTask();
  const fitting = (await samples).filter(({ tasks }) => tasks.includes(task.name));
  if (task !== api.usedTask()) return;
  const buttons = fitting.map((sample) =>
    make(
      "button",
      { type: "button", class: "sample", title: sample.credit, onclick: () => take(sample) },
      make("img", { src: api.address(sample.url).href, alt: "", width: 48, height: 36 }),
      sample.name.replaceAll("_", " "),
    ),
  );
  byId("samples").replaceChildren(...buttons);
}

/** List the route's variants, and keep the selection. */
function offerVariants(route) {
  const select = byId("variant");
  const names = (route?.variants ?? []).map(({ name }) => name);
  const offered = [...select.options].slice(1).map(({ value }) => value);
  if (names.join("\n") === offered.join("\n")) return;
  const chosen = select.value;
  select.replaceChildren(select.options[0], ...names.map((name) => make("option", { value: name }, name)));
  select.value = names.includes(chosen) ? chosen : "";
}
