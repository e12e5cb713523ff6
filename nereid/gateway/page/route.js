/** The route's weights: seen by everybody, changed with a key that may. */

import * as api from "./api.js";
import { bar, byId, errorBlock, make, percent, pipeline, variantName } from "./dom.js";

const EVERY_MS = 2000;

/**
 * Show the route and edit its weights; `onRoute` gets each new state, or why there is none.
 * @param {{onRoute: (route: ?api.Route, error: ?api.ApiError) => void}} panels
 */
export function startRoute({ onRoute }) {
  /** @type {?api.Route} */
  let route = null;
  /** @type {?api.Access} */
  let access = null;
  /** @type {?api.ApiError} */
  let missing = null;
  let askedAt = -Infinity;
  let isApplying = false;

  const isEdited = () => route?.variants.some(({ name, weight }) => input(name)?.value !== String(weight)) ?? false;

  /** Ask for the route, unless it was just asked for; edits stay, and may be refused later. */
  async function refresh(isForced = false) {
    if (isApplying || (!isForced && performance.now() - askedAt < EVERY_MS)) return;
    askedAt = performance.now();
    try {
      const state = await api.route();
      if (!isApplying) take(state, isEdited());
    } catch (error) {
      const { status, message } = error;
      if ([401, 403, 404].includes(status)) lose(error);
      else if (status) warn(message);
    }
  }

  function lose(error) {
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
    warn(isOther ? "Somebody else has changed the route since you began." : state.is_served ? "" : notServed(state));
    if (names(state) !== names(route)) showInputs(state);
    else if (keepsEdits) return onRoute(state, null);
    route = state;
    for (const { name, weight } of state.variants) input(name).value = String(weight);
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
        make("label", { for: id }, variantName(name), pipeline(model, version)),
        make("input", { id, type: "number", min: 0, max: 1e9, step: "any", required: true, "data-name": name }),
        make("output", { for: id }),
        bar(0, name),
      );
    });
    byId("weights").replaceChildren(...rows);
  }

  /** The shares that the weights in the fields would give. */
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
    if (isEdited()) say(isValid ? "" : total === 0 ? "One weight must be above 0." : "A weight is a number from 0.");
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
    why.replaceChildren("Changing weights needs a key that may, entered above: ", command);
  }

  async function apply() {
    if (!route) return;
    const { weights } = proposed();
    isApplying = true;
    byId("apply").disabled = true;
    say("Changing the route …");
    try {
      const state = await api.setWeights(weights, route.generation);
      take(state, false);
      say(`Generation ${state.generation} ${state.is_served ? "is served" : "is written, and not served yet"}.`);
    } catch (error) {
      await explain((error));
    } finally {
      isApplying = false;
    }
  }

  /** Show why nothing was changed; after a conflict, the weights of the other's change. */
  async function explain(error) {
    if (error.code !== "conflict") {
      byId("apply").disabled = false;
      byId("weights-message").replaceChildren(errorBlock(error));
      return;
    }
    await api.route().then((state) => take(state, false), () => {});
    say("Somebody else changed the route: these are its weights now, and yours were not applied.");
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
    setAccess(told, maySee) {
      access = told;
      if (maySee) refresh(true);
      else lose(new api.ApiError("unauthenticated", "Seen with a key that may classify.", { status: 401 }));
      showRights();
    },
  };
}

const input = (name) => byId(`weight-${name}`);

const notServed = ({ detail }) => `Not served yet. ${detail}`;

function warn(text) {
  byId("route-detail").hidden = !text;
  byId("route-detail").textContent = text;
}

const say = (text) => byId("weights-message").replaceChildren(text);
