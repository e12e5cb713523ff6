/** The gateway's HTTP API: what it answers, and one error for every way of getting no answer. */

/** @typedef {{label: string, index: number, score: number}} Label */
/**
 * `variant` is empty if the model is no route, `predictions` are best first, `timings_ms` stages and `total`.
 * @typedef {{request_id: string, model: string, variant: string, version: string, reason: string,
 *   predictions: Label[], timings_ms: Record<string, number>}} Answer
 */
/** @typedef {{variant?: string, route_key?: string, top_k?: number}} Options */
/**
 * `version` is the network's, `share` that of new requests, `breaker` empty if it is not known.
 * @typedef {{name: string, model: string, version: string, weight: number, share: number,
 *   breaker: string}} RouteVariant
 */
/**
 * @typedef {{model: string, generation: number, is_served: boolean, detail: string,
 *   variants: RouteVariant[]}} Route
 */
/** @typedef {{requests_per_s: number, p50_ms: ?number, p99_ms: ?number}} Rates */
/** @typedef {Rates & {variant: string, share: number}} LiveVariant */
/**
 * `history` has one entry a second, oldest first.
 * @typedef {{window_s: number, in_flight: number, limit: ?number, outcomes: Record<string, number>,
 *   variants: LiveVariant[], history: Rates[]}} Live
 */
/** @typedef {{keys_needed: boolean, name: ?string, scopes: string[]}} Access */
/** @typedef {{name: string, url: string, credit: string}} Sample */

const STORED = "nereid.key";

/** No answer: the gateway's own error, or `no_connection` if nothing came from it. */
export class ApiError extends Error {
  constructor(code, message, { status = 0, requestId = "", retryAfterS = 0 } = {}) {
    super(message);
    this.code = code;
    this.status = status;
    this.requestId = requestId;
    this.retryAfterS = retryAfterS;
  }
}

/** @returns {string} the key of this tab, or nothing */
export function storedKey() {
  try {
    return sessionStorage.getItem(STORED) ?? "";
  } catch {
    return "";
  }
}

/** Send `secret` from now on; an empty one sends none. */
export function storeKey(/** @type {string} */ secret) {
  if (secret) sessionStorage.setItem(STORED, secret);
  else sessionStorage.removeItem(STORED);
}

/** Resolve a path against the page, so that the gateway may stand behind a prefix. */
export function address(/** @type {string} */ path) {
  return new URL(path.replace(/^\/+/, ""), document.baseURI);
}

/** The address that classifies one image with these options; those left empty are left out. */
export function predictAddress(/** @type {Options} */ options) {
  const url = address("predict");
  for (const [name, value] of Object.entries(options)) {
    if (value !== "" && value !== undefined) url.searchParams.set(name, String(value));
  }
  return url;
}

/** What a file is sent as: the gateway looks at its bytes, and only needs to know that they are a file. */
export function contentType(/** @type {Blob} */ file) {
  return file.type.startsWith("image/") ? file.type : "application/octet-stream";
}

/**
 * Classify the bytes of a file, untouched.
 * @param {Blob} file
 * @param {Options} options
 * @param {AbortSignal} signal
 * @returns {Promise<Answer>}
 */
export function predict(file, options, signal) {
  const headers = { "Content-Type": contentType(file) };
  return ask(predictAddress(options), { method: "POST", body: file, headers, signal });
}

/** @returns {Promise<Live>} */
export const live = (/** @type {AbortSignal} */ signal) => ask(address("v1/live"), { signal });

/** @returns {Promise<Route>} */
export const route = (/** @type {AbortSignal=} */ signal) => ask(address("v1/route"), { signal });

/** @returns {Promise<Access>} */
export const access = () => ask(address("v1/access"));

/** @returns {Promise<Sample[]>} */
export const samples = () => ask(address("samples"));

/**
 * Replace the route's weights, if it still has the generation they were made for.
 * @param {Record<string, number>} weights
 * @param {number} generation
 * @returns {Promise<Route>}
 */
export function setWeights(weights, generation) {
  const body = JSON.stringify({ weights, generation });
  return ask(address("v1/route/weights"), { method: "PUT", body, headers: { "Content-Type": "application/json" } });
}

/** The bytes of a sample. */
export async function download(/** @type {string} */ url) {
  return (await send(address(url), {})).blob();
}

async function ask(url, init = {}) {
  const response = await send(url, init);
  return response.json();
}

/** Send with the key of this tab; throws ApiError unless the answer is good. */
async function send(url, init) {
  const headers = new Headers(init.headers);
  if (storedKey()) headers.set("Authorization", `Bearer ${storedKey()}`);
  let response;
  try {
    response = await fetch(url, { ...init, headers, cache: "no-store" });
  } catch (error) {
    if (init.signal?.aborted) throw error;
    throw new ApiError("no_connection", "The gateway does not answer, or the connection broke.");
  }
  if (response.ok) return response;
  throw await refusal(response);
}

/** Read an error; what stands between browser and gateway may send one that is not the gateway's. */
async function refusal(response) {
  const told = await response.json().catch(() => ({}));
  return new ApiError(told.error?.code ?? `http_${response.status}`, told.error?.message ?? response.statusText, {
    status: response.status,
    requestId: told.request_id ?? response.headers.get("X-Request-ID") ?? "",
    retryAfterS: Number(response.headers.get("Retry-After")) || 0,
  });
}
