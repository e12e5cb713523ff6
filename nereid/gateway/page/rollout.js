/** The route's newest rollout in words, and its orders; visible with `infer`, ordered with the scope `route`. */

import * as api from "./api.js";
import { byId, errorBlock, make } from "./dom.js";

const LABELS = { pause: "Pause", resume: "Resume", promote: "Give it all traffic", abort: "Abort" };

/**
 * Show the rollout of the route; `onOrder` is called after an order.
 * @param {{onOrder: () => void}} panels
 */
export function startRollout({ onOrder }) {
  let mayChange = false;
  /** @type {?api.Route} */
  let route = null;
  let shown = "";

  async function order(name, candidate = "") {
    const model = route?.model;
    byId("rollout-message").replaceChildren();
    try {
      const state = await api.orderRollout(name, candidate);
      if (route?.model !== model) return;
      show(state);
      onOrder();
    } catch (error) {
      if (route?.model === model) byId("rollout-message").replaceChildren(errorBlock(error));
    }
  }

  function show(state) {
    if (!state) byId("rollout-message").replaceChildren();
    route = state;
    byId("rollout").hidden = !route;
    const rollout = route?.rollout;
    byId("rollout-text").textContent = rollout?.text ?? "No rollout yet.";
    const orders = rollout && rollout.phase !== "ended" ? rollout.orders : [];
    const candidates = rollout && rollout.phase !== "ended" ? [] : (route?.variants ?? []).filter(({ share }) => share < 1);
    const now = JSON.stringify([orders, candidates.map(({ name }) => name), mayChange]);
    if (now === shown) return;
    shown = now;
    byId("rollout-orders").replaceChildren(
      ...orders.map((name) => make("button", { type: "button", disabled: !mayChange, onclick: () => order(name) }, LABELS[name])),
      ...candidates.map(({ name }) =>
        make("button", { type: "button", disabled: !mayChange, onclick: () => order("start", name) }, `Start a rollout of ${name}`),
      ),
    );
  }

  return {
    setRoute: show,
    setAccess(access) {
      mayChange = ["route", "admin"].some((scope) => access.scopes.includes(scope));
      show(route);
    },
  };
}
