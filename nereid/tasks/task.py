"""The record of a task: all that other rooms know about it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from typing import Any


@dataclass(frozen=True, slots=True)
class Task:
    """One task.

    Triton's stubs import all records, so a record has texts only. Its faces are imported on first use.

    Attributes:
        name: as in `nereid add --task NAME` and `/v1/models`; also the name of its command.
        work: what its models do, for messages: `finds objects`.
        present, past: what its command does: `searching`, `searched`.
        model: name of the model that is used first.
        outputs: names of the outputs that a model must have.
        path: path of its REST endpoint.
        repository: the models of the package for this task; None if it has none.
        fix: how to get a model.
        extends: name of the task that its models can do, too; such a task has no command of its own.
        is_default: whether it is the task of models that no other task recognises.
        faces: what a room imports, by the name of the face, as `module:NAME` within the folder of the task.
        public: names that `import nereid` offers, by their module within the folder.
    """

    name: str
    work: str
    present: str
    past: str
    model: str
    outputs: tuple[str, ...]
    path: str
    repository: Path | None = None
    fix: str = ""
    extends: str = ""
    is_default: bool = False
    faces: Mapping[str, str] = field(default_factory=dict)
    public: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def face(self, name: str) -> Any:
        """Import a face of the task; None if it does not have it.

        The faces, and the rooms that import them:
            outputs: function (names of outputs, class names) -> `TaskOutputs`; backends, drift, comparisons.
            result: `nereid.client.result_kind.ResultKind`; client and gateway.
            client, async_client: subclasses of `ModelClient` and `AsyncModelClient`; command line and drift.
            view: `nereid.cli.image_commands.views.View`, how the command shows results.
            endpoint: `nereid.gateway.endpoint.Endpoint`: the REST answer, its parameters, sample photos, and
                further operations. `page.js` beside it shows the answer on the gateway's page: it exports a
                `TaskPage` of `nereid/gateway/page/api.js` by the name of the task.
            intake: `nereid.models.publish.intake.chosen_task.Intake`, what `nereid add` does with a network.
            examination: how a changed network is compared with the current one.
            check: function that returns the problems of a pinned model's config; `nereid check`.
        """
        place = self.faces.get(name)
        return resolve_name(f"nereid.tasks.{place}") if place else None
