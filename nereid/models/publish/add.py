"""Addition of an ONNX file under a public name, with all models and the route that serve it."""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nereid.backends.routing.assignment import Route, Salts, Variant, format_route
from nereid.base.config.model_config import ModelConfig
from nereid.base.errors import InvalidConfig, InvalidImage, OperationFailed, WrongUsage
from nereid.base.task_registry import DEFAULT_TASK
from nereid.models.publish import examination, staged_version
from nereid.models.publish.actions import Action, AddVariant, Install, LoadVersion, SetAside, Warm
from nereid.models.publish.configs import Addition, ModelNames
from nereid.models.publish.examination import (
    ExaminationLimits,
    ExaminationRequest,
    Measurements,
    examine,
    titles,
)
from nereid.models.publish.importing import network_facts
from nereid.models.publish.importing.adaptation import Adapted, NetworkChoices
from nereid.models.publish.importing.graph_edits import ActivationRule
from nereid.models.publish.importing.model_importer import ModelImporter, choose_importer, named_importer
from nereid.models.publish.importing.network_facts import ANY_SIZE, Size
from nereid.models.publish.importing.serving_settings import PROCESS_BYTES, ServingSettings
from nereid.models.publish.network import examination_request, write_on_cpu
from nereid.models.publish.publisher import Published
from nereid.models.publish.remove import RemovableModels, find_parts
from nereid.models.publish.staged_version import Description
from nereid.models.publish.transaction import StagedOperation, locked_repository
from nereid.models.rollout.rollout_journal import check_none_active
from nereid.models.routes.location import check_repository, find_route, read_route_file
from nereid.repository import check, instance_sizing, onnx_file
from nereid.repository.repository_index import PinnedModel, pinned_models, read_labels
from nereid.server.run_dir import ServerInfo
from nereid.vision.imaging.preprocess_settings import PRESETS, PreprocessSettings
from nereid.vision.imaging.preprocessor import Preview, preview

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,50}")
PROFILES = ("cpu", "gpu")


class Declined(OperationFailed):
    """The proposal was not accepted; nothing has changed."""


@dataclass(frozen=True, slots=True)
class AddRequest:
    """The ONNX file to add, and the properties of its models.

    Args:
        source: the file, or a folder with it and its external data.
        name: the public name.
        parameters: parameters of the preprocessing, a `preset` among them.
        labels: a file with one class or character per line; None for the names in the file's metadata.
        activation, size, output, head, post_processing: as in `NetworkChoices`.
        profiles: hardware profiles to write configs for.
        instances: processes of the pinned model on a CPU; None for as many as fit the machine.
        images: photos whose results are shown; () for the task's own.
        is_replacing: whether to replace models of that name; if there are none, the model is just added.
        preview: PNG file to write, showing the photos as the network sees them.
        task: name of the task; empty to find it from the file.
    """

    source: Path
    name: str
    parameters: Mapping[str, str] = field(default_factory=dict)
    labels: Path | None = None
    activation: ActivationRule = "auto"
    size: Size = ANY_SIZE
    output: str = ""
    profiles: tuple[str, ...] = PROFILES
    instances: int | None = None
    images: tuple[Path, ...] = ()
    is_replacing: bool = False
    preview: Path | None = None
    task: str = ""
    head: str = ""
    post_processing: Mapping[str, str] = field(default_factory=dict)

    @property
    def choices(self) -> NetworkChoices:
        """The choices about the network."""
        labels = read_labels(self.labels) if self.labels else ()
        return NetworkChoices(
            self.size, self.output, self.activation, self.head, self.post_processing, labels
        )


@dataclass(frozen=True, slots=True)
class AddProposal:
    """A model before it is added: how its file is read, what changes, and what it costs.

    Args:
        about: rows for the screen: a word, and what the network returns.
        parameters_from: origin of the parameters missing from the request; empty if there are none.
        value_range: smallest and largest number that the network receives for the photos; None if it has no
            preprocessing of its own.
        labels: class names, or characters; empty if there are none.
        changes: what is changed in the file, one sentence each.
        processes, memory_bytes: what a server with the profile `cpu` needs.
        results: what was found, by image; the importer formats it.
        models: the models behind the route, in load order.
        shared: default models that are also used and already in the repository.
    """

    importer: ModelImporter
    settings: ServingSettings
    about: Sequence[tuple[str, str]]
    parameters_from: str
    value_range: tuple[float, float] | None
    labels: Sequence[str]
    labels_from: str
    changes: Sequence[str]
    measurements: Measurements
    processes: int
    memory_bytes: int
    results: Mapping[str, Sequence[Any]]
    models: tuple[str, ...]
    shared: tuple[str, ...]


def add(
    repository: Path,
    request: AddRequest,
    server_info: ServerInfo | None,
    report: Callable[[str], None] = lambda line: None,
    confirm: Callable[[AddProposal], bool] = lambda proposal: True,
) -> Published:
    """Write network, preprocessing, post-processing, pinned model and route for an ONNX file, and load them.

    If it is killed, the next command that changes the repository finishes or undoes the addition.

    Args:
        repository: the model repository; created if it does not exist.
        request: the file and its properties.
        server_info: the running server, if there is one.
        report: receives a line per step.
        confirm: decides whether to add the examined network, before anything has changed.

    Raises:
        WrongUsage: the request does not fit the file, or the name is taken.
        Declined: `confirm` returned false.
        OperationFailed: the network is rejected, or the server refuses a model, and nothing has changed.
        OSError: a file cannot be read or written.
    """
    start = time.monotonic()
    _check_request(repository, request)
    repository.mkdir(parents=True, exist_ok=True)
    with locked_repository(repository, server_info, report) as locked:
        if request.is_replacing:
            check_none_active(repository, f"replace '{request.name}'", request.name)
        names = ModelNames.for_route(request.name)
        with locked.preparation("add", request.name, 1) as staged:
            repository = staged.workspace.repository
            old = find_parts(repository, request.name) if request.is_replacing else RemovableModels(())
            if not request.is_replacing:
                # Only some tasks have a preprocess model, so it is checked once it is certainly written.
                _check_free(repository, (names.route, names.pinned, names.network), names.route)
            proposal = StagedAddition(request, names, staged).propose()
            if not request.is_replacing:
                _check_free(repository, proposal.models, names.route)
            if not confirm(proposal):
                raise Declined(f"'{request.name}' was not added")
        # The old models are removed only now that the new ones were examined and accepted.
        replaced = tuple(model for model in old.models if model not in proposal.shared)
        locked.commit(staged, _actions(proposal.models, names, replace(old, models=replaced)))
        return Published(names.network, 1, (names.pinned,), proposal.measurements, time.monotonic() - start)


def add_cpu_fallback(
    repository: Path,
    route: str,
    server_info: ServerInfo | None,
    report: Callable[[str], None] = lambda line: None,
) -> str:
    """Copy the pinned model of a route's default variant to the CPU, as the route's first fallback.

    The copy keeps the versions of its parts. Returns its name.

    Raises:
        WrongUsage: the route or its model does not fit.
        OperationFailed: the model cannot be copied, or the server refuses it, and nothing has changed.
        OSError: a file cannot be read or written.
    """
    check_repository(repository)
    with locked_repository(repository, server_info, report) as locked:
        location = find_route(repository, route)
        check_none_active(repository, f"change the fallbacks of '{location.name}'")
        default = read_route_file(location).route().replacements[0]
        name, variant = f"{default.model}_cpu", f"{default.name}_cpu"
        if (repository / name).exists():
            raise WrongUsage(
                f"'{repository}' already has a model '{name}'; fix: nereid route fallback {variant}"
            )
        with locked.preparation("add", name, 1) as staged:
            write_on_cpu(repository / default.model, staged.workspace.staging / "new" / name)
        fallback = AddVariant(location.name, variant, name, 0, is_fallback=True)
        locked.commit(staged, (Install(name, name), LoadVersion(name, 1), Warm(name, 1), fallback))
        return name


def _check_request(repository: Path, request: AddRequest) -> None:
    if not NAME.fullmatch(request.name):
        raise WrongUsage(
            f"invalid name: expected at most 51 letters, digits, '.', '_' and '-', got '{request.name}'"
        )
    if (preset := request.parameters.get("preset", "")) and preset not in PRESETS:
        raise WrongUsage(f"invalid preset: expected one of {', '.join(PRESETS)}, got '{preset}'")
    if unknown := [profile for profile in request.profiles if profile not in PROFILES]:
        raise WrongUsage(f"invalid profile: expected one of {', '.join(PROFILES)}, got '{unknown[0]}'")
    for path, kind in [(request.labels, "label file"), *((image, "image") for image in request.images)]:
        if path and not path.is_file():
            raise WrongUsage(f"{kind} '{path}' does not exist")
    if repository.exists():
        check_repository(repository)


def _check_free(repository: Path, models: Sequence[str], public: str) -> None:
    for name in models:
        if (repository / name).exists():
            raise WrongUsage(
                f"'{repository}' already has a model '{name}'; "
                f"fix: nereid publish {public} for a new version, another --name, or --replace"
            )
    route = repository / f"{public}.route.json"
    if route.exists():
        raise WrongUsage(
            f"'{repository}' already has a file '{route.name}'; fix: move the file away, or another --name"
        )


def _actions(behind: Sequence[str], names: ModelNames, old: RemovableModels) -> tuple[Action, ...]:
    """Return the actions in an order in which a server that starts meanwhile can load every model."""
    return (
        *([SetAside(old.models, old.files)] if old.models else []),
        *(Install(name, name) for name in behind),
        Install(f"{names.route}.route.json"),
        *(LoadVersion(name, 1) for name in behind),
        Warm(names.pinned, 1),
        Install(names.route, names.route),
        LoadVersion(names.route, 1),
        Warm(names.route, 1),
    )


class StagedAddition:
    """The new files of an addition, written step by step to the staging folder."""

    def __init__(self, request: AddRequest, names: ModelNames, staged: StagedOperation) -> None:
        """Copy the network, and choose its task."""
        self._request, self._names, self._user = request, names, staged.operation.user
        self._repository, self._report = staged.workspace.repository, _once(staged.workspace.report)
        self._new = staged.workspace.staging / "new"
        self._version = self._new / names.network / "1"
        self._network = self._version / "model.onnx"
        origin = staged_version.network_file(request.source, "model.onnx").resolve()
        staged_version.stage(request.source, self._version, "model.onnx")
        self._facts = facts = network_facts.read(origin.parent, onnx_file.read(self._network))
        size = request.size if any(request.size) else facts.exporter_settings.size
        self._choose(choose_importer(request.task, facts, size))

    def _choose(self, importer: ModelImporter) -> None:
        request, self._importer = self._request, importer
        self._choices = importer.with_notes(request.choices, self._facts)
        self._images = tuple(dict.fromkeys(request.images or importer.samples))

    def _is_claimed(self, task: str, content: bytes) -> bool:
        """Switch to a task that claims the outputs, unless the user or the file says that they are scores."""
        request, facts = self._request, self._facts
        is_told = request.task or facts.task or request.labels or facts.labels or request.activation != "auto"
        if not task or is_told or self._importer.name != DEFAULT_TASK.name:
            return False
        self._report(
            f"note: this is a network of task '{task}'; fix: --task {DEFAULT_TASK.name} if it is not"
        )
        self._network.write_bytes(content)
        self._choose(named_importer(task))
        return True

    def propose(self) -> AddProposal:
        """Write all files, and examine the network."""
        request, names, importer, choices = self._request, self._names, self._importer, self._choices
        content = self._network.read_bytes()
        adapted = importer.adapt(self._network, choices)
        settings = self._settings(adapted)
        labels, labels_from = self._labels(settings.classes)
        parameters, origin = importer.preprocessing(
            settings, self._facts.exporter_settings, request.parameters
        )
        companions = importer.copy_companions(names.route, self._repository, self._new)
        settings = replace(
            settings,
            parameters=parameters,
            has_labels=bool(labels),
            instances=request.instances,
            companions=companions,
        )
        self._write(settings, labels)
        photos = self._preview()
        self._report(f"{request.source.name}: staged as '{names.network}'")
        first_run = examination.make_first_run(self._examination(), progress=self._progress)
        if self._is_claimed(first_run.claimed_by, content):
            return self.propose()
        if (activation := importer.activation(choices, first_run)) != "none":
            self._network.write_bytes(content)
            adapted = importer.adapt(self._network, choices, activation)
            settings = replace(settings, outputs=self._settings(adapted).outputs)
            if importer.leaves_out_by_score:
                first_run = examination.make_first_run(self._examination(), progress=self._progress)
        settings = replace(settings, can_batch=first_run.can_batch)
        models = self._write(settings, labels)
        measured = self._examine(adapted.notes)
        self._describe(settings, adapted)
        missing = (name for name in companions if not (self._repository / name).exists())
        processes, memory_bytes = self._cost(measured)
        return AddProposal(
            importer=importer,
            settings=settings,
            about=importer.rows(settings, first_run, activation),
            parameters_from=origin,
            value_range=(photos.lowest, photos.highest) if photos else None,
            labels=labels,
            labels_from=labels_from,
            changes=tuple(adapted.changes),
            measurements=measured,
            processes=processes,
            memory_bytes=memory_bytes,
            results=dict(zip(titles(self._images), first_run.results, strict=False)),
            models=(*missing, *[*models.configs()][:-1]),
            shared=tuple(name for name in companions if (self._repository / name).exists()),
        )

    def _settings(self, adapted: Adapted) -> ServingSettings:
        signature = onnx_file.read(self._network).signature
        return self._importer.settings(self._facts, signature, adapted.outputs, self._choices)

    def _labels(self, classes: int) -> tuple[tuple[str, ...], str]:
        """Return the labels and their origin; labels from the metadata that do not fit are ignored."""
        path, (labels, origin) = self._request.labels, self._importer.labels(self._facts)
        if path:
            labels, origin = read_labels(path, classes), f"'{path.name}'"
        self._importer.check_labels(labels, origin)
        if labels and classes and len(labels) != classes:
            self._report(
                f"note: {origin} has {len(labels)} class names, but the network has "
                f"{classes} classes; they are not used"
            )
            return (), ""
        return labels, origin

    def _preview(self) -> Preview | None:
        """Preprocess the photos before the network runs, and write what it will see."""
        request = self._request
        if not (name := self._pin().preprocess):
            if request.preview:
                raise WrongUsage(
                    "cannot preview whole images for a network that takes one "
                    f"{self._importer.unit} at a time; fix: omit --preview"
                )
            return None
        try:
            config = ModelConfig.from_file(self._new / name, 1)
            settings = PreprocessSettings.from_config(config)
            photos = preview(settings, {str(path): path.read_bytes() for path in self._images})
        except InvalidConfig as error:
            text = str(error).partition(f"model '{name}': ")
            raise WrongUsage(f"preprocessing: {text[2] or text[0]}") from None
        except InvalidImage as error:
            raise WrongUsage(f"--images: {error}") from None
        if request.preview:
            request.preview.write_bytes(photos.png)
            self._report(f"preview: '{request.preview}' shows what the network sees of each photo")
        return photos

    def _write(self, settings: ServingSettings, labels: Sequence[str]) -> Addition:
        names = self._names
        models = self._importer.models(names, settings, self._request.choices)
        for name, texts in models.configs().items():
            folder = self._new / name
            (folder / "1").mkdir(parents=True, exist_ok=True)
            for profile, text in texts.items():
                if not profile or profile in self._request.profiles:
                    path = folder / "configs" / f"{profile}.pbtxt" if profile else folder / "config.pbtxt"
                    path.parent.mkdir(exist_ok=True)
                    path.write_text(text, encoding="utf-8")
            if name != names.network:
                (folder / "1" / ".gitkeep").touch()
            if name in models.labelled:
                lines = "".join(f"{label}\n" for label in labels)
                (folder / staged_version.LABELS).write_text(lines, encoding="utf-8")
        variant = Variant("v1", names.pinned, 1, 100, deadline_ms=models.deadline_ms)
        salts = Salts(variants=names.route, shadows=f"{names.route} shadows")
        route = Route(variants=(variant,), default="v1", salts=salts)
        (self._new / f"{names.route}.route.json").write_bytes(format_route(route))
        return models

    def _examine(self, notes: Sequence[str]) -> Measurements:
        """Check the files as a server would, and examine the network; `notes` precede the report's own."""
        if failures := [finding for finding in check.check(self._new) if finding.verdict == "fail"]:
            first = {
                failure.found: failure for failure in reversed(failures)
            }  # several files may share a fault
            raise OperationFailed(
                "; ".join(f"{failure.model}, {failure.what}: {fault}" for fault, failure in first.items())
            )
        measured = examine(self._examination(), progress=self._progress)
        measured = replace(measured, notes=(*notes, *measured.notes))
        for note in measured.notes:
            self._report(f"note: {note}")
        return measured

    def _describe(self, settings: ServingSettings, adapted: Adapted) -> None:
        request = self._request
        description = Description(
            source=request.source.name,
            sha256=self._facts.sha256,
            output=request.output,
            activation=request.activation,
            changes=tuple(adapted.changes),
            task=self._importer.name,
            head=settings.head,
        )
        staged_version.write_description(self._version, description)
        staged_version.write_checksums(self._version, request.source, self._user)

    def _cost(self, measured: Measurements) -> tuple[int, int]:
        """Return the number of processes of a server with the profile `cpu`, and their memory in bytes."""
        name, own_bytes = self._request.name, self._importer.process_bytes
        alone = instance_sizing.allocate_instances(
            {name: 1.0}, instance_sizing.Machine.detect(), {name: own_bytes} if own_bytes else None
        )
        instances = self._request.instances or alone.counts[name]
        process_bytes = own_bytes or measured.memory_bytes + PROCESS_BYTES
        return instances + 1, instances * process_bytes + PROCESS_BYTES

    def _pin(self) -> PinnedModel:
        (pin,) = [pin for pin in pinned_models(self._new) if pin.model == self._names.pinned]
        return pin

    def _examination(self) -> ExaminationRequest:
        limits = ExaminationLimits(images=self._images)
        return examination_request(self._new / self._names.network, self._version, None, self._pin(), limits)

    def _progress(self, line: str) -> None:
        self._report(f"examination: {line}")


def _once(report: Callable[[str], None]) -> Callable[[str], None]:
    """Return a function that reports each line once, because a network may be reexamined with other files."""
    lines: set[str] = set()

    def report_new(line: str) -> None:
        if line not in lines:
            lines.add(line)
            report(line)

    return report_new
