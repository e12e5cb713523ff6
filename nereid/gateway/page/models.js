/** The model that the page shows; a list appears if the gateway offers several. */

import * as api from "./api.js";
import { byId, make } from "./dom.js";

/** Call `onModel` after each choice of another model. */
export function startModels(/** @type {{onModel: () => void}} */ { onModel }) {
  const select = byId("model");
  select.addEventListener("change", () => {
    api.useModel(select.value);
    onModel();
  });
  return {
    async refresh() {
      const names = (await api.models().catch(() => [])).map(({ name }) => name);
      const chosen = select.value;
      select.replaceChildren(...names.map((name) => make("option", { value: name }, name)));
      select.value = names.includes(chosen) ? chosen : (names[0] ?? "");
      byId("model-field").hidden = names.length < 2;
    },
  };
}
