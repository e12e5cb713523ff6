/** Who is asking: the key of this tab, and what it may do. */

import * as api from "./api.js";
import { byId } from "./dom.js";

/** Show who is signed in, and tell `onAccess` at the start and after each change. */
export function startAccess(/** @type {{onAccess: (access: api.Access) => void}} */ { onAccess }) {
  const form = byId("access-form");
  const message = byId("access-message");

  async function refresh() {
    const access = await api.access().catch(forget);
    show(access);
    onAccess(access);
  }

  /** Drop a key that the gateway does not take; what anybody may do remains. */
  function forget(error) {
    const isRefused = error.status === 401;
    message.textContent = isRefused ? "The gateway does not know this key." : error.message;
    if (!isRefused) return { keys_needed: true, name: null, scopes: [] };
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
    byId("access-who").focus();
  });
  refresh();
}

function show({ keys_needed, name, scopes }) {
  byId("access-who").textContent = name ? `Key: ${name}` : "Key";
  byId("access-scopes").textContent = name
    ? `${name} may: ${scopes.join(", ")}.`
    : keys_needed
      ? "This gateway needs a key: nereid key add NAME."
      : "No key is needed to classify and to look.";
  byId("sign-out").hidden = !name;
}
