/** Client of the gateway's HTTP API; every failure becomes an `ApiError`. */

import { DEFAULT } from "./tasks.js";

/**
 * The answer of a task also has its own fields. `variant` is empty if the model is not a route; `timings_ms` has stages and `total`.
 * @typedef {{request_id: string, model: string, variant: string, version: string, reason: string,
 *   timings_ms: Record<string, number>}} Answer
 */
/** @typedef {{verdict: (Node | string)[], found: HTMLElement[]}} Shown */
/**
 * How the answers of variants are compared: `best` returns what should be equal, `show` makes one answer, with the first
 * variant's for comparison, and `unit` explains it.
 * @typedef {{button: string, hint: string, unit: (first: string) => string, best: (answer: any) => {id: any, label: string},
 *   show: (answer: any, variant: string, first?: any) => HTMLElement[]}} Comparison
 */
/**
 * How the page shows a task: `title` is its tab, `again` the button that repeats a request, `show` makes the answer for
 * a file. `hasTopK` offers the number of classes, `isPreviewed` shows what the network sees of an image.
 * @typedef {{title: string, again: string, show: (answer: any, file: Blob) => Shown, hasTopK?: boolean,
 *   isPreviewed?: boolean, comparison?: Comparison}} TaskPage
 */
/** `path` is that of its endpoint. @typedef {TaskPage & {name: string, path: string}} Task */
/** @typedef {{variant?: string, route_key?: string, top_k?: number, format?: string}} Options */
/**
 * `version` is that of the model, `share` that of new requests, `breaker` empty while unknown.
 * @typedef {{name: string, model: string, version: string, weight: number, share: number,
 *   breaker: string}} RouteVariant
 */
/**
 * @typedef {{model: string, generation: number, is_served: boolean, detail: string,
 *   variants: RouteVariant[], rollout: ?Rollout}} Route
 */
/**
 * `phase` is `ended` after the rollout, `orders` has those that the phase allows, `text` has its state in words.
 * @typedef {{number: number, candidate: string, phase: string, orders: string[], text: string}} Rollout
 */
/** @typedef {{requests_per_s: number, p50_ms: ?number, p99_ms: ?number}} Rates */
/** @typedef {Rates & {variant: string, share: number}} LiveVariant */
/**
 * `history` has one entry a second, oldest first.
 * @typedef {{window_s: number, in_flight: number, limit: ?number, outcomes: Record<string, number>,
 *   variants: LiveVariant[], history: Rates[], is_ready: ?boolean, why_not_ready: string}} Live
 */
/** @typedef {{name: string, task: string}} Model */
/** @typedef {{keys_needed: boolean, name: ?string, scopes: string[]}} Access */
/** @typedef {{name: string, url: string, credit: string, tasks: string[]}} Sample */

const STORED = "nereid.key";
let model = "";
/** @type {Task} */
let task = DEFAULT;

/** A failed request: the gateway's error, or `no_connection` without a response. */
export class ApiError extends Error {
  constructor(code, message, { status = 0, requestId = "", retryAfterS = 0 } = {}) {
    super(message);
    this.code = code;
    this.status = status;
    this.requestId = requestId;
    this.retryAfterS = retryAfterS;
  }
}

/** @returns {string} the key of this tab, or "" */
export function storedKey() {
  try {
    return sessionStorage.getItem(STORED) ?? "";
  } catch {
    return "";
  }
}

/** Send `secret` with later requests; "" sends no key. */
export function storeKey(/** @type {string} */ secret) {
  if (secret) sessionStorage.setItem(STORED, secret);
  else sessionStorage.removeItem(STORED);
}

/** Resolve a path against the page, so that a proxy may add a prefix. */
export function address(/** @type {string} */ path) {
  return new URL(path.replace(/^\/+/, ""), document.baseURI);
}

/** Choose the task of later requests for images, and the model of later requests; "" is the gateway's default. */
export function use(/** @type {Task} */ chosenTask, /** @type {string} */ chosenModel) {
  task = chosenTask;
  model = chosenModel;
}

/** @returns {Task} the task of requests for images */
export const usedTask = () => task;

/** Return the URL of an operation of the chosen model; `path` is that without a model. */
function modelAddress(/** @type {string} */ operation, path = `v1/${operation}`) {
  return address(model ? `v1/models/${encodeURIComponent(model)}/${operation}` : path);
}

/** Return the URL that runs the chosen task on one image; empty options are omitted. */
export function predictAddress(/** @type {Options} */ options) {
  const url = modelAddress(task.path.split("/").pop() ?? "", task.path);
  for (const [name, value] of Object.entries(options)) {
    if (value !== "" && value !== undefined) url.searchParams.set(name, String(value));
  }
  return url;
}

/**
 * Run the chosen task on the unchanged bytes of a file.
 * @param {Blob} file
 * @param {Options} options
 * @param {AbortSignal} signal
 * @returns {Promise<Answer>}
 */
export async function predict(file, options, signal) {
  return (await sendFile(predictAddress(options), file, signal)).json();
}

/** @returns {Promise<Live>} */
export const live = (/** @type {AbortSignal} */ signal) => fetchJson(modelAddress("live"), { signal });

/** @returns {Promise<Route>} */
export const route = (/** @type {AbortSignal=} */ signal) => fetchJson(modelAddress("route"), { signal });

/** @returns {Promise<Model[]>} the default model first */
export const models = () => fetchJson(address("v1/models"));

/** @returns {Promise<Access>} */
export const access = () => fetchJson(address("v1/access"));

/** @returns {Promise<Sample[]>} */
export const samples = () => fetchJson(address("samples"));

/**
 * Replace the route's weights if the route still has this generation.
 * @param {Record<string, number>} weights
 * @param {number} generation
 * @returns {Promise<Route>}
 */
export function setWeights(weights, generation) {
  return changeRoute("PUT", "route/weights", { weights, generation });
}

/**
 * Start a rollout of a candidate, or give an order to the active one.
 * @param {string} order
 * @param {string} candidate
 * @returns {Promise<Route>}
 */
export function orderRollout(order, candidate) {
  return changeRoute("POST", "rollout", { order, candidate });
}

/** Return a picture of a file as the network sees it. */
export async function preview(/** @type {Blob} */ file) {
  return (await sendFile(modelAddress("preview"), file)).blob();
}

/** Read a file again, and return it as a PDF whose text can be searched. */
export async function searchable(/** @type {Blob} */ file) {
  return (await sendFile(predictAddress({ format: "pdf" }), file)).blob();
}

/** Return the bytes of a sample. */
export async function download(/** @type {string} */ url) {
  return (await send(address(url), {})).blob();
}

function changeRoute(method, operation, change) {
  const headers = { "Content-Type": "application/json" };
  return fetchJson(modelAddress(operation), { method, body: JSON.stringify(change), headers });
}

/** Send a file; the gateway detects the image format from the bytes. */
function sendFile(url, /** @type {Blob} */ file, /** @type {AbortSignal=} */ signal) {
  const type = file.type.startsWith("image/") ? file.type : "application/octet-stream";
  return send(url, { method: "POST", body: file, headers: { "Content-Type": type }, signal });
}

async function fetchJson(url, init = {}) {
  const response = await send(url, init);
  return response.json();
}

/** Send with the key of this tab; throw ApiError unless the request succeeds. */
async function send(url, init) {
  const headers = new Headers(init.headers);
  if (storedKey()) headers.set("Authorization", `Bearer ${storedKey()}`);
  let response;
  try {
    response = await fetch(url, { ...init, headers, cache: "no-store" });
  } catch (error) {
    if (init.signal?.aborted) throw error;
    throw new ApiError("no_connection", "The gateway does not respond, or the connection was lost.");
  }
  if (response.ok) return response;
  throw await errorOf(response);
}

/** Read an error response; a proxy may have sent it, without the gateway's fields. */
async function errorOf(response) {
  const body = await response.json().catch(() => ({}));
  return new ApiError(body.error?.code ?? `http_${response.status}`, body.error?.message ?? response.statusText, {
    status: response.status,
    requestId: body.request_id ?? response.headers.get("X-Request-ID") ?? "",
    retryAfterS: Number(response.headers.get("Retry-After")) || 0,
  });
}
