"""The record of a task: everything that other packages know about it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from nereid.base.assets import REPOSITORY


@dataclass(frozen=True, slots=True)
class NumberOption:
    """A whole number, at least 1, that a command passes along with each request.

    Attributes:
        name: option name, without `--`.
        argument: name of the client's request option.
        default: value if the option is not given.
        help: help text of the option.
    """

    name: str
    argument: str
    default: int
    help: str


@dataclass(frozen=True, slots=True)
class CommandTexts:
    """Help texts of a task's command; required for a task with the entry point `view`.

    Attributes:
        help: first sentence of the help: what the command does.
        csv: help of `--csv`: which rows it prints.
        note: last sentence of the help, about images without a result.
        draws: whether the view provides boxes for `--draw`.
        suffixes: suffixes of the files in a folder that it reads, besides images.
        writes_pdf: whether the view provides `searchable` for `--pdf`.
        numbers: further options.
    """

    help: str
    csv: str
    note: str = ""
    draws: bool = False
    suffixes: tuple[str, ...] = ()
    writes_pdf: bool = False
    numbers: tuple[NumberOption, ...] = ()


# Where a model's networks run: in its own process, or as models on the server.
IN_PROCESS, AS_MODELS = "in_process", "served"


@dataclass(frozen=True, slots=True)
class TaskBackend:
    """The Triton backend of a task's models.

    Attributes:
        name: backend name in the models' configs.
        parts: parameters that name the models behind one of its models; each also has a `…_version`.
        networks: where these run if the parameter `networks` is missing: `in_process`, or `served` by Triton.
        instance_bytes: memory of a process that runs them itself; 0 for the memory of one network.
    """

    name: str
    parts: tuple[str, ...] = ()
    networks: str = ""
    instance_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Task:
    """One task.

    Triton's stubs import all records, so a record contains only text, and its entry points
    are imported on first use.

    Attributes:
        name: task name in `nereid add --task NAME` and `/v1/models`; also the name of its command.
        verb_phrase: what its models do, for messages: `finds objects`.
        present_participle, past_participle: what its command is doing or has done: `searching`, `searched`.
        model: name of the model to use first.
        outputs: names of the outputs that a model must have.
        path: path of its REST endpoint.
        repository: the models shipped for this task; None if there are none.
        fix: how to get a model.
        sample: shipped image on which its models find something; None if any photo is suitable.
        extends: name of a task that its models can also do; such a task has no command of its own.
        network: what networks added for it return, for help: `scores of classes`; empty if none can be added.
        is_default: whether models that no other task recognises belong to it.
        command: texts of its command, `nereid NAME`; None if it has no entry point `view`.
        backend: backend of models that need more than preprocessing and a network; None if not needed.
        entry_points: objects that other packages import, by name, as `module:NAME` within the task's folder.
        public: names exported by `import nereid`, by module within the folder.
    """

    name: str
    verb_phrase: str
    present_participle: str
    past_participle: str
    model: str
    outputs: tuple[str, ...]
    path: str
    repository: Path | None = None
    fix: str = ""
    sample: Path | None = None
    extends: str = ""
    network: str = ""
    is_default: bool = False
    command: CommandTexts | None = None
    backend: TaskBackend | None = None
    entry_points: Mapping[str, str] = field(default_factory=dict)
    public: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def folder(self) -> str:
        """The name of its folder in `nereid/tasks`."""
        return self.entry_points["result"].partition(".")[0]

    @property
    def default_repository(self) -> Path:
        """The default repository of its command."""
        return self.repository or REPOSITORY

    def entry_point(self, name: str) -> Any:
        """Import an entry point of the task; None if the task does not have it.

        The entry points, and the packages that import them:
            outputs: function (names of outputs, class names) -> `TaskOutputs`; backends, drift, comparisons.
            result: `nereid.client.result_kind.ResultKind`; client and gateway.
            client, async_client: subclasses of `ModelClient` and `AsyncModelClient`; command line and drift.
            view: `nereid.cli.image_commands.view.View`: columns and rows of CSV, tables of a terminal, boxes
                to draw. It is imported when the command runs; JSON comes from the fields of the result.
            endpoint: `nereid.gateway.task_endpoint.Endpoint`: the REST answer, its parameters, sample photos,
                and further operations. `page.js` beside it shows the answer on the gateway's page: it exports
                a `TaskPage` of `nereid/gateway/page/api.js` by the name of the task.
            importer: `nereid.models.publish.importing.model_importer.ModelImporter`, what `nereid add` does
                with a network.
            claims: function (network outputs by name, for two or more images) -> whether a network of unknown
                task belongs to this task; `nereid add`. Most tasks recognise a file instead.
            examination: `nereid.models.publish.examination.Examination`, how a changed network is compared.
            post_processing: function (config of a model of the backend) ->
                `nereid.backends.triton.post_processing.Postprocessor`; backends and checks.
            settings: parameters of a model of the backend, like `FusedSettings`; layout of repositories.
            check: function (`nereid.repository.check.Profile`, name of a model) -> verdicts and texts.
            metrics: prefix, labels and families of the backend's metrics; the page about metrics.
            stages: cause and next step, by the stages of its models; `nereid why`.
        """
        reference = self.entry_points.get(name)
        return resolve_name(f"nereid.tasks.{reference}") if reference else None
