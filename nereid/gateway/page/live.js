/** What the gateway does now: polled once a second while the page is seen. */

import * as api from "./api.js";
import { Chart } from "./chart.js";
import { bar, byId, colourVariants, make, milliseconds, percent, variantName } from "./dom.js";

const EVERY_MS = 1000;
const LONGEST_MS = 16_000;

/**
 * Poll and show; `onTick` is told of every poll that was answered.
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
      showState("live", "live");
      onTick();
    } catch (error) {
      if (signal.aborted) return;
      failures += 1;
      showFailure(error);
    }
    if (!document.hidden) timer = setTimeout(poll, pause());
  }

  const pause = () => Math.min(LONGEST_MS, EVERY_MS * 2 ** failures);

  function show(live) {
    byId("live-message").hidden = true;
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
    const isRefused = error.status === 401 || error.status === 403;
    const when = `next try in ${pause() / 1000} s`;
    showState(isRefused ? "waiting" : "broken", isRefused ? "key needed" : `no connection, ${when}`);
    byId("live-message").hidden = false;
    byId("live-message").textContent = isRefused ? `Not shown: ${error.message}` : `${error.message} The ${when}.`;
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
    setAccess(may) {
      maySee = may;
      byId("live-message").hidden = may;
      byId("live-message").textContent = "Seen with a key that may classify, entered under “Key” above.";
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

/** Say how the connection is; unchanged text is left alone, so that it is not read out again. */
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
  byId("outcomes").replaceChildren(...(chips.length ? chips : ["no request yet"]));
}

/** One row for each variant that the route has or that has answered. */
function showVariants(live, route) {
  const seen = new Map(live.variants.map((each) => [each.variant, each]));
  const told = new Map((route?.variants ?? []).map((each) => [each.name, each]));
  const names = [...new Set([...told.keys(), ...seen.keys()])];
  byId("variants").replaceChildren(...names.map((name) => variantRow(name, seen.get(name), told.get(name))));
}

function variantRow(name, seen, told) {
  const badge = told ? [make("span", { class: "badge", "data-breaker": breaker(told) }, breaker(told))] : [];
  const traffic = bar(seen?.share ?? 0, name);
  if (told) {
    traffic.style.setProperty("--weight", String(told.share));
    traffic.append(make("span", { class: "tick" }));
  }
  const weight = told ? [make("span", { class: "note" }, ` │ ${percent(told.share)}`)] : [];
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

const breaker = (told) => told.breaker.replaceAll("_", "-") || "not asked yet";
