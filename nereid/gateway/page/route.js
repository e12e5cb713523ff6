/** The route's weights: visible with the scope `infer`, changed with the scope `route`. */

import * as api from "./api.js";
import { bar, byId, errorBlock, make, percent, modelNote, variantName } from "./dom.js";

const EVERY_MS = 2000;

/**
 * Show the route and edit its weights; `onRoute` gets each new state, or the error.
 * @param {{onRoute: (route: ?api.Route, error: ?api.ApiError) => void}} panels
 */
export function startRoute({ onRoute }) {
  /** @type {?api.Route} */
  let route = null;
  /** @type {?api.Access} */
  let access = null;
  /** @type {?api.ApiError} */
  let missing = null;
  let fetchedAt = -Infinity;
  let isApplying = false;
  let shown = new AbortController();

  const isEdited = () => route?.variants.some(({ name, weight }) => input(name)?.value !== String(weight)) ?? false;

  /** Fetch the route, unless it was fetched recently; edits stay, and a later conflict may reject them. */
  async function refresh(isForced = false) {
    if (isApplying || (!isForced && performance.now() - fetchedAt < EVERY_MS)) return;
    fetchedAt = performance.now();
    const { signal } = shown;
    try {
      const state = await api.route(signal);
      if (!isApplying) take(state, isEdited());
    } catch (error) {
      if (signal.aborted) return;
      const { status, message } = error;
      if ([401, 403, 404].includes(status)) lose(error);
      else if (status) warn(message);
    }
  }

  function lose(/** @type {?api.ApiError} */ error) {
    route = null;
    missing = error;
    byId("weights").replaceChildren();
    byId("generation").textContent = "";
    showRights();
    onRoute(null, error);
  }

  function take(state, keepsEdits) {
    const names = (each) => each?.variants.map(({ name }) => name).join("\n");
    missing = null;
    const isOther = keepsEdits && state.generation !== route?.generation;
    byId("generation").textContent = `${state.model}, generation ${state.generation}`;
    warn(isOther ? "Another user has changed the route since you began." : state.is_served ? "" : `Not served yet. ${state.detail}`);
    if (names(state) !== names(route)) showInputs(state);
    else if (keepsEdits) return onRoute(state, null);
    route = state;
    for (const { name, weight, model, version } of state.variants) {
      input(name).value = String(weight);
      input(name).parentElement.querySelector(".note").replaceWith(modelNote(model, version));
    }
    showShares();
    showRights();
    onRoute(state, null);
  }

  function showInputs(state) {
    const rows = state.variants.map(({ name, model, version }) => {
      const id = `weight-${name}`;
      return make(
        "div",
        { class: "weight" },
        make("label", { for: id }, variantName(name), modelNote(model, version)),
        make("input", { id, type: "number", min: 0, max: 1e9, step: "any", required: true, "data-name": name }),
        make("output", { for: id }),
        bar(0, name),
      );
    });
    byId("weights").replaceChildren(...rows);
  }

  /** Show the shares that result from the weights in the fields. */
  function showShares() {
    if (!route) return;
    const { total, isValid } = proposed();
    for (const { name } of route.variants) {
      const share = isValid ? input(name).valueAsNumber / total : 0;
      const row = input(name).parentElement;
      row.querySelector("output").textContent = isValid ? percent(share) : "–";
      row.querySelector(".track").style.setProperty("--share", String(share));
    }
    byId("apply").disabled = !isEdited() || !isValid;
    byId("reset").disabled = !isEdited();
    const wrong = total === 0 ? "At least one weight must be above 0." : "A weight must be a number of at least 0.";
    if (isEdited()) say(isValid ? "" : wrong);
  }

  function proposed() {
    const weights = {};
    for (const { name } of route?.variants ?? []) weights[name] = input(name).valueAsNumber;
    const total = Object.values(weights).reduce((sum, each) => sum + each, 0);
    const isValid = total > 0 && Object.keys(weights).every((name) => input(name).validity.valid);
    return { weights, total, isValid };
  }

  function showRights() {
    const mayChange = ["route", "admin"].some((scope) => access?.scopes.includes(scope));
    byId("weights-fields").disabled = !route || !mayChange;
    byId("weights-form").hidden = !route;
    const why = byId("weights-why");
    if (missing || mayChange) return why.replaceChildren(missing?.message ?? "");
    const command = make("code", { class: "command" }, "nereid key add NAME --scope route");
    why.replaceChildren("To change weights, enter a key with the scope “route” under “Key”. To create one: ", command);
  }

  async function apply() {
    if (!route) return;
    const { weights } = proposed();
    const { signal } = shown;
    isApplying = true;
    byId("apply").disabled = true;
    say("Changing the route …");
    try {
      const state = await api.setWeights(weights, route.generation);
      if (signal.aborted) return;
      take(state, false);
      say(`Generation ${state.generation} ${state.is_served ? "is served" : "is written, but not served yet"}.`);
    } catch (error) {
      if (!signal.aborted) await explain(error, signal);
    } finally {
      if (!signal.aborted) isApplying = false;
    }
  }

  /** Show the reason of a rejected change; after a conflict, also the present weights. */
  async function explain(error, /** @type {AbortSignal} */ signal) {
    if (error.code !== "conflict") {
      byId("apply").disabled = false;
      byId("weights-message").replaceChildren(errorBlock(error));
      return;
    }
    await api.route(signal).then((state) => take(state, false), () => {});
    if (!signal.aborted) say("Another user changed the route. These are the present weights; yours were not applied.");
  }

  byId("weights-form").addEventListener("submit", (event) => {
    event.preventDefault();
    apply();
  });
  byId("weights").addEventListener("input", showShares);
  byId("reset").addEventListener("click", () => {
    say("");
    if (route) take(route, false);
  });
  return {
    refresh,
    /** Show another model; what is under way for the present one is not shown. */
    restart() {
      shown.abort();
      shown = new AbortController();
      isApplying = false;
      lose(null);
      warn("");
      say("");
      refresh(true);
    },
    setAccess(given, maySee) {
      access = given;
      if (maySee) refresh(true);
      else lose(new api.ApiError("unauthenticated", "To see the route, enter a key with the scope “infer”.", { status: 401 }));
      showRights();
    },
  };
}

const input = (name) => byId(`weight-${name}`);

function warn(text) {
  byId("route-detail").hidden = !text;
  byId("route-detail").textContent = text;
}

const say = (text) => byId("weights-message").replaceChildren(text);
