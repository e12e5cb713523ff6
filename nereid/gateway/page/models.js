/** The task and the model that the page shows; a choice appears only if the gateway offers several. */

import * as api from "./api.js";
import { rove } from "./boxes.js";
import { byId, make } from "./dom.js";
import { DEFAULT, TASKS } from "./tasks.js";

/** Call `onModel` after each change of the task or the model. */
export function startModels(/** @type {{onModel: () => void}} */ { onModel }) {
  const select = byId("model");
  /** @type {api.Model[]} */
  let models = [];
  let task = DEFAULT;
  let used = `${task.name}/`;

  function use(name) {
    const model = name === models[0]?.name ? "" : name;
    api.use(task, model);
    if (`${task.name}/${model}` === used) return;
    used = `${task.name}/${model}`;
    onModel();
  }

  function show() {
    const names = models.filter((model) => model.task === task.name).map(({ name }) => name);
    const chosen = select.value;
    select.replaceChildren(...names.map((name) => make("option", { value: name }, name)));
    select.value = names.includes(chosen) ? chosen : (names[0] ?? "");
    byId("model-field").hidden = names.length < 2;
    byId("image-title").textContent = task.title;
    byId("again").textContent = task.again;
    byId("top-k-field").hidden = !task.hasTopK;
    byId("compare").hidden = !task.comparison;
    byId("compare-all").textContent = task.comparison?.button ?? "";
    for (const tab of byId("tasks").children) tab.setAttribute("aria-selected", String(tab.dataset.task === task.name));
    use(select.value);
  }

  function chooseTask(name) {
    task = TASKS[name];
    show();
  }

  function showTabs() {
    const offered = Object.keys(TASKS).filter((name) => models.some((model) => model.task === name));
    const shown = [...byId("tasks").children].map((tab) => tab.dataset.task);
    byId("tasks").hidden = offered.length < 2;
    if (offered.join() === shown.join()) return;
    const tabs = offered.map((name) =>
      make("button", { type: "button", role: "tab", "data-task": name, "aria-controls": "image-panel", onclick: () => chooseTask(name) }, TASKS[name].title),
    );
    byId("tasks").replaceChildren(...tabs);
    rove(byId("tasks"), tabs);
  }

  select.addEventListener("change", () => use(select.value));
  show();
  return {
    async refresh() {
      const found = await api.models().catch(() => []);
      // A server that does not respond leaves the task unknown.
      models = found.map((model) => ({ ...model, task: model.task in TASKS ? model.task : DEFAULT.name }));
      const isOffered = models.some((model) => model.task === task.name);
      if (!isOffered && models.length) task = TASKS[models[0].task];
      showTabs();
      show();
    },
  };
}
