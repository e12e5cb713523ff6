/** The key of this tab and its permissions. */

import * as api from "./api.js";
import { byId } from "./dom.js";

/** Show the owner of the key; call `onAccess` at the start and after each change. */
export function startAccess(/** @type {{onAccess: (access: api.Access) => void}} */ { onAccess }) {
  const form = byId("access-form");
  const message = byId("access-message");

  async function refresh() {
    const access = await api.access().catch(forget);
    show(access);
    onAccess(access);
  }

  /** Remove a key that the gateway rejects, and return the permissions without a key. */
  function forget(error) {
    const isRejected = error.status === 401;
    message.textContent = isRejected ? "Unknown key." : error.message;
    if (!isRejected) return { keys_needed: true, name: null, scopes: [] };
    api.storeKey("");
    return api.access();
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    message.textContent = "";
    api.storeKey(byId("key").value);
    byId("key").value = "";
    refresh();
  });
  byId("sign-out").addEventListener("click", () => {
    api.storeKey("");
    message.textContent = "";
    refresh();
  });
  byId("access").addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    byId("access").open = false;
    byId("access-name").focus();
  });
  refresh();
}

function show({ keys_needed, name, scopes }) {
  byId("access-name").textContent = name ? `Key: ${name}` : "Key";
  byId("access-scopes").textContent = name
    ? `Scopes of ${name}: ${scopes.join(", ")}.`
    : keys_needed
      ? "This gateway requires a key. To create one: nereid key add NAME --scope infer"
      : "Sending images needs no key.";
  byId("sign-out").hidden = !name;
}
