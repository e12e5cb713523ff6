/** Start of the page; panels exchange data only through the callbacks here. */

import { startAccess } from "./access.js";
import { startCompare } from "./compare.js";
import { startImage } from "./image.js";
import { startLive } from "./live.js";
import { startModels } from "./models.js";
import { startRollout } from "./rollout.js";
import { startRoute } from "./route.js";

const compare = startCompare();
const rollout = startRollout({ onOrder: () => route.refresh(true) });
const image = startImage({ onImage: compare.setImage });
const route = startRoute({
  onRoute: (state, error) => {
    image.setRoute(state);
    compare.setRoute(state, error);
    live.setRoute(state);
    rollout.setRoute(state);
  },
});
const live = startLive({ onTick: route.refresh });
const models = startModels({
  onModel: () => {
    // The route comes first: its variants are options of a request.
    route.restart();
    image.setModel();
    live.restart();
  },
});
startAccess({
  onAccess: (access) => {
    const maySee = ["infer", "admin"].some((scope) => access.scopes.includes(scope));
    if (maySee) models.refresh();
    image.setAccess(maySee);
    route.setAccess(access, maySee);
    rollout.setAccess(access);
    live.setAccess(maySee);
  },
});
