/** Live load of the gateway, polled once a second while the page is visible. */

import * as api from "./api.js";
import { Chart } from "./chart.js";
import { bar, byId, colourVariants, make, milliseconds, percent, variantName } from "./dom.js";

const EVERY_MS = 1000;
const MAX_PAUSE_MS = 16_000;

/**
 * Poll and show the load; call `onTick` after every successful poll.
 * @param {{onTick: () => void}} panels
 */
export function startLive({ onTick }) {
  const rate = new Chart("Requests per second", (value) => (value ?? 0).toFixed(1));
  const latency = new Chart("Latency, ms", milliseconds);
  byId("charts").append(rate.element, latency.element);
  /** @type {?api.Route} */
  let route = null;
  /** @type {?api.Live} */
  let last = null;
  let timer = 0;
  let failures = 0;
  let maySee = false;
  let polling = new AbortController();

  async function poll() {
    polling = new AbortController();
    const { signal } = polling;
    try {
      last = await api.live(signal);
      failures = 0;
      show(last);
      onTick();
    } catch (error) {
      if (signal.aborted) return;
      failures += 1;
      showFailure(error);
    }
    if (!document.hidden) timer = setTimeout(poll, pause());
  }

  const pause = () => Math.min(MAX_PAUSE_MS, EVERY_MS * 2 ** failures);

  function show(live) {
    const isDown = live.is_ready === false;
    byId("live-message").hidden = !isDown;
    byId("live-message").textContent = isDown ? `The model does not answer: ${live.why_not_ready}.` : "";
    showState(isDown ? "broken" : "live", isDown ? "model not ready" : "live");
    byId("window").textContent = String(live.window_s);
    const before = Array(Math.max(0, live.window_s - live.history.length)).fill(null);
    const of = (name) => [...before, ...live.history.map((each) => each[name])];
    rate.draw([{ name: "", values: of("requests_per_s") }]);
    latency.draw([
      { name: "p50", values: of("p50_ms") },
      { name: "p99", values: of("p99_ms") },
    ]);
    showLoad(live);
    showVariants(live, route);
  }

  function showFailure(error) {
    const isRejected = error.status === 401 || error.status === 403;
    const when = `${pause() / 1000} s`;
    showState(isRejected ? "waiting" : "broken", isRejected ? "key needed" : `no connection, next try in ${when}`);
    byId("live-message").hidden = false;
    byId("live-message").textContent = isRejected ? `Not shown: ${error.message}` : `${error.message} Next try in ${when}.`;
  }

  function resume() {
    clearTimeout(timer);
    polling.abort();
    failures = 0;
    if (maySee && !document.hidden) poll();
    else showState("waiting", maySee ? "paused" : "key needed");
  }

  document.addEventListener("visibilitychange", resume);
  return {
    /** Show another model. */
    restart() {
      last = null;
      for (const chart of [rate, latency]) chart.draw([]);
      for (const id of ["variants", "outcomes"]) byId(id).replaceChildren();
      byId("live-message").hidden = true;
      showState("waiting", "connecting");
      resume();
    },
    setAccess(may) {
      maySee = may;
      byId("live-message").hidden = may;
      byId("live-message").textContent = "To see the load, enter a key with the scope “infer” under “Key”.";
      resume();
    },
    setRoute(state) {
      route = state;
      if (route) colourVariants(route.variants.map(({ name }) => name));
      byId("served").textContent = route ? route.model : "";
      if (last) showVariants(last, route);
    },
  };
}

/** Show the state of the connection; screen readers would read an unchanged text again. */
function showState(state, text) {
  const element = byId("connection");
  element.dataset.state = state;
  if (element.textContent !== text) element.textContent = text;
}

function showLoad({ in_flight, limit, outcomes }) {
  byId("in-flight").textContent = limit ? `${in_flight} of ${limit}` : String(in_flight);
  const meter = byId("in-flight-meter");
  meter.hidden = !limit;
  meter.max = limit || 1;
  meter.value = in_flight;
  const chips = Object.entries(outcomes).map(([name, count]) =>
    make("span", { class: "outcome", "data-ok": name === "ok" ? 1 : 0 }, `${name} ${count}`),
  );
  byId("outcomes").replaceChildren(...(chips.length ? chips : ["no requests yet"]));
}

/** Show one row for each variant that is in the route or has answered. */
function showVariants(live, route) {
  const seen = new Map(live.variants.map((each) => [each.variant, each]));
  const routed = new Map((route?.variants ?? []).map((each) => [each.name, each]));
  const names = [...new Set([...routed.keys(), ...seen.keys()])];
  byId("variants").replaceChildren(...names.map((name) => variantRow(name, seen.get(name), routed.get(name))));
}

function variantRow(name, seen, routed) {
  const badge = routed ? [make("span", { class: "badge", "data-breaker": routed.breaker }, health(routed))] : [];
  const traffic = bar(seen?.share ?? 0, name);
  if (routed) {
    traffic.style.setProperty("--weight", String(routed.share));
    traffic.append(make("span", { class: "tick" }));
  }
  const weight = routed ? [make("span", { class: "note" }, ` │ ${percent(routed.share)}`)] : [];
  const number = (text) => make("td", { class: "number" }, text);
  return make(
    "tr",
    {},
    make("th", { scope: "row" }, variantName(name || "the model"), " ", ...badge),
    make("td", { class: "share" }, make("span", {}, percent(seen?.share ?? 0), ...weight), traffic),
    number((seen?.requests_per_s ?? 0).toFixed(1)),
    number(milliseconds(seen?.p50_ms ?? null)),
    number(milliseconds(seen?.p99_ms ?? null)),
  );
}

/** @type {Record<string, string>} */
const HEALTH = { closed: "answers", "half-open": "is tried again", open: "paused after failures" };

/** Return the state of a variant's circuit breaker in words. */
const health = ({ breaker }) => HEALTH[breaker] ?? "no requests yet";
