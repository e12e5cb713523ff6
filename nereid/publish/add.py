"""Addition of an ONNX file under a public name: network, preprocessing, pinned model and route."""

import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from msgspec.structs import replace as with_fields

from nereid.assets import SAMPLES
from nereid.config.model_config import ModelConfig, read_pbtxt
from nereid.errors import OperationFailed, WrongUsage
from nereid.imaging.preprocess_settings import PRESETS, PreprocessSettings
from nereid.imaging.preview import Preview, preview
from nereid.publish import candidate
from nereid.publish.configs import Addition, Names
from nereid.publish.engine.actions import Action, Install, Load, Warm, Workspace
from nereid.publish.engine.engine import begin, commit, locked_repository
from nereid.publish.examination.examine import ExaminationRequest, Gates, Report, examine, survey
from nereid.publish.intake import adaptation, description, form, metadata
from nereid.publish.intake.adaptation import ActivationRule, Choices
from nereid.publish.intake.description import Description
from nereid.publish.intake.form import Form
from nereid.publish.intake.metadata import Metadata
from nereid.publish.intake.successor import activation_to_append
from nereid.publish.publisher import Published
from nereid.publish.remove import find_parts, remove_parts
from nereid.repository import fitting, onnx_file
from nereid.repository.check import check
from nereid.routing.assignment import Route, Salts, Variant, format_route
from nereid.server.run_dir import ServerRecord
from nereid.serving_errors import InvalidConfig, InvalidImage

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,50}")
PROFILES = ("cpu", "gpu")
# Python, NumPy and ONNX Runtime in a process without a network. Source: loadtest/results/memory.json.
PROCESS_BYTES = 45 * 2**20


@dataclass(frozen=True, slots=True)
class AddRequest:
    """The ONNX file to add, and the properties of its models.

    Args:
        source: the file, or a folder with it and its external data.
        name: the public name.
        parameters: parameters of the preprocessing, a `preset` among them.
        labels: a file with one class per line; None for the names in the file's metadata.
        activation: function to append to the scores; `auto` decides after a run.
        size_px: height and width of the input, for a network that accepts any size.
        output: the output with the scores, for a network with several outputs.
        profiles: hardware profiles to write configs for.
        instances: processes of the pinned model on a CPU; None for those that fit the machine.
        is_replacing: whether models of that name are removed first.
        images: photos whose top classes are shown.
        preview: PNG file to write, with what the network sees of the photos.
    """

    source: Path
    name: str
    parameters: Mapping[str, str] = field(default_factory=dict)
    labels: Path | None = None
    activation: ActivationRule = "auto"
    size_px: int = 0
    output: str = ""
    profiles: tuple[str, ...] = PROFILES
    instances: int | None = None
    images: tuple[Path, ...] = SAMPLES
    is_replacing: bool = False
    preview: Path | None = None


@dataclass(frozen=True, slots=True)
class Proposal:
    """A model before it is added: how its file is read, what changes, and what it costs.

    Args:
        form: input and scores of the network.
        parameters: all parameters of the preprocessing.
        parameters_from: origin of those that the request does not contain; empty if there are none.
        value_range: smallest and largest number that the network receives for the photos.
        labels: class names; empty if there are none.
        labels_from: their origin.
        is_multi_label: whether the scores are independent probabilities.
        can_batch: whether the network computes several images at a time.
        changes: what is changed in the file, one sentence each.
        report: measurements.
        processes, memory_bytes: those that a server with the profile `cpu` gets.
        top_classes: per image the indices of the largest scores, the largest first.
    """

    form: Form
    parameters: Mapping[str, str]
    parameters_from: str
    value_range: tuple[float, float]
    labels: Sequence[str]
    labels_from: str
    is_multi_label: bool
    can_batch: bool
    changes: Sequence[str]
    report: Report
    processes: int
    memory_bytes: int
    top_classes: Mapping[str, Sequence[int]]


class Declined(OperationFailed):
    """The proposal was not accepted; nothing has changed."""


def accept(proposal: Proposal) -> bool:
    """Accept any proposal."""
    return True


def add(
    repository: Path,
    request: AddRequest,
    record: ServerRecord | None,
    report: Callable[[str], None] = lambda line: None,
    confirm: Callable[[Proposal], bool] = accept,
) -> Published:
    """Write network, preprocessing, pinned model and route for an ONNX file, and load them.

    If it is killed, the next command that changes the repository finishes or undoes the addition.

    Args:
        repository: the model repository; created if it does not exist.
        request: the file and its properties.
        record: the running server, if there is one.
        report: receives a line per step.
        confirm: decides about the examined network, before anything has changed.

    Raises:
        WrongUsage: the request does not fit the file, or the name is taken.
        Declined: `confirm` returned false.
        OperationFailed: the network is rejected, or the server refuses a model, and nothing has changed.
        OSError: a file cannot be read or written.
    """
    start = time.monotonic()
    _check_request(repository, request)
    repository.mkdir(parents=True, exist_ok=True)
    with locked_repository(repository, record, report) as (log, unstaged):
        operation, workspace = begin(log, unstaged, "add", request.name, 1)
        names = Names.behind(request.name)
        try:
            old = find_parts(repository, request.name) if request.is_replacing else None
            if not old:
                _check_names(workspace.repository, names)
            proposal = _Staging(request, names, workspace).stage(operation.user)
            if not confirm(proposal):
                raise Declined(f"'{request.name}' was not added")
        except BaseException as error:
            log.write("undone", operation, str(error))
            raise
        if old and old.models:
            # The old models are removed only now, as the new ones were examined and accepted.
            remove_parts(log, unstaged, request.name, old)
        commit(log, with_fields(operation, actions=_actions(names)), workspace)
        return Published(names.network, 1, (names.pinned,), proposal.report, time.monotonic() - start)


def _check_request(repository: Path, request: AddRequest) -> None:
    if not NAME.fullmatch(request.name):
        raise WrongUsage(
            f"invalid name: expected at most 51 letters, digits, '.', '_' and '-', got '{request.name}'"
        )
    if (preset := request.parameters.get("preset", "")) and preset not in PRESETS:
        raise WrongUsage(f"invalid preset: expected one of {', '.join(PRESETS)}, got '{preset}'")
    if unknown := [each for each in request.profiles if each not in PROFILES]:
        raise WrongUsage(f"invalid profile: expected one of {', '.join(PROFILES)}, got '{unknown[0]}'")
    for path, what in [(request.labels, "label file"), *((image, "image") for image in request.images)]:
        if path and not path.is_file():
            raise WrongUsage(f"{what} '{path}' does not exist")
    if repository.exists() and not repository.is_dir():
        raise WrongUsage(f"'{repository}' is not a folder; fix: name a model repository, or nereid init DIR")


def _check_names(repository: Path, names: Names) -> None:
    for name in reversed(names):
        if (repository / name).exists():
            raise WrongUsage(
                f"'{repository}' already has a model '{name}'; "
                f"fix: nereid publish {names.route} for a new version, another --name, or --replace"
            )
    route = repository / f"{names.route}.route.json"
    if route.exists():
        raise WrongUsage(
            f"'{repository}' already has a file '{route.name}'; fix: move the file away, or another --name"
        )


def _actions(names: Names) -> tuple[Action, ...]:
    """Return the actions in an order in which a server that starts meanwhile can load every model."""
    behind = (names.network, names.preprocess, names.pinned)
    return (
        *(Install(name, name) for name in behind),
        Install(f"{names.route}.route.json"),
        *(Load(name, 1) for name in behind),
        Warm(names.pinned, 1),
        Install(names.route, names.route),
        Load(names.route, 1),
        Warm(names.route, 1),
    )


class _Staging:
    """The new files of an addition, written step by step to the staging folder."""

    def __init__(self, request: AddRequest, names: Names, workspace: Workspace) -> None:
        self._request, self._names, self._workspace = request, names, workspace
        self._new = workspace.staging / "new"
        self._version = self._new / names.network / "1"
        self._network = self._version / "model.onnx"

    def stage(self, user: str) -> Proposal:
        """Write all files, and examine the network."""
        request = self._request
        original = candidate.network_file(request.source, "model.onnx").resolve()
        candidate.stage(request.source, self._version, "model.onnx")
        found = onnx_file.read(self._network)
        meta = metadata.read(original, found.model)
        scores, changes = adaptation.adapt_file(self._network, Choices(request.output))
        kind = form.read(found.signature, onnx_file.read(self._network).signature, scores, request.size_px)
        labels, labels_from = self._labels(meta, kind)
        known = form.known_parameters(kind, meta.parameters, request.parameters)
        parameters = form.preprocessing(kind, {**known, **request.parameters})
        self._write(kind, parameters, labels, can_batch=True)
        seen_by_network = self._preview()
        self._report(f"{request.source.name}: staged as '{self._names.network}'")
        seen = survey(self._examination(labels), progress=self._progress)
        if (activation := activation_to_append(request.activation, seen)) != "none":
            scores, appended = adaptation.adapt_file(self._network, Choices(scores, activation))
            changes += appended
            kind = replace(kind, scores=kind.scores._replace(name=scores))
        self._write(kind, parameters, labels, seen.can_batch)
        if failures := [finding for finding in check(self._new) if finding.verdict == "fail"]:
            raise OperationFailed("; ".join(f"{each.model}, {each.what}: {each.found}" for each in failures))
        measured = examine(self._examination(labels), progress=self._progress)
        for note in measured.notes:
            self._report(f"note: {note}")
        rule = (request.output, request.activation)
        description.write(
            self._version, Description(request.source.name, found.sha256, *rule, tuple(changes))
        )
        candidate.write_checksums(self._version, request.source, user)
        alone = fitting.counts({request.name: 1.0}, fitting.Machine.present()).counts
        instances = request.instances or alone[request.name]
        return Proposal(
            form=kind,
            parameters=parameters,
            parameters_from=meta.parameters_from if known else "",
            value_range=(seen_by_network.lowest, seen_by_network.highest),
            labels=labels,
            labels_from=labels_from,
            is_multi_label=seen.is_multi_label,
            can_batch=seen.can_batch,
            changes=changes,
            report=measured,
            processes=instances + 1,
            memory_bytes=instances * (measured.memory_bytes + PROCESS_BYTES) + PROCESS_BYTES,
            top_classes=dict(zip((each.name for each in request.images), seen.top_classes, strict=True)),
        )

    def _labels(self, meta: Metadata, kind: Form) -> tuple[tuple[str, ...], str]:
        """Return the class names and their origin; names of the metadata that do not fit are left out."""
        path = self._request.labels
        if path:
            return tuple(path.read_text(errors="replace").splitlines()), f"'{path.name}'"
        if meta.labels and len(meta.labels) != kind.classes:
            self._report(
                f"note: {meta.labels_from} has {len(meta.labels)} class names, but the network has "
                f"{kind.classes} classes; they are not used"
            )
            return (), ""
        return meta.labels, meta.labels_from

    def _preview(self) -> Preview:
        """Preprocess the photos before the network runs, and write what it will see.

        Raises:
            WrongUsage: a parameter is unknown or invalid, or a photo cannot be read.
        """
        request = self._request
        try:
            config = ModelConfig.from_file(self._new / self._names.preprocess, 1)
            settings = PreprocessSettings.from_config(config)
            found = preview(settings, {str(path): path.read_bytes() for path in request.images})
        except InvalidConfig as error:
            text = str(error).partition(f"model '{self._names.preprocess}': ")
            raise WrongUsage(f"preprocessing: {text[2] or text[0]}") from None
        except InvalidImage as error:
            raise WrongUsage(f"--images: {error}") from None
        if request.preview:
            request.preview.write_bytes(found.png)
            self._report(f"preview: '{request.preview}' shows what the network sees of each photo")
        return found

    def _write(
        self, kind: Form, parameters: Mapping[str, str], labels: Sequence[str], can_batch: bool
    ) -> None:
        names, given = self._names, tuple(parameters.items())
        more = can_batch, self._request.instances
        addition = Addition(names, kind.image, kind.scores, given, bool(labels), *more)
        for name, texts in addition.configs().items():
            folder = self._new / name
            (folder / "1").mkdir(parents=True, exist_ok=True)
            for profile, text in texts.items():
                if not profile or profile in self._request.profiles:
                    path = folder / "configs" / f"{profile}.pbtxt" if profile else folder / "config.pbtxt"
                    path.parent.mkdir(exist_ok=True)
                    path.write_text(text)
            if name != names.network:
                (folder / "1" / ".gitkeep").touch()
            if labels and name != names.preprocess:
                self._write_labels(folder / candidate.LABELS, labels)
        variant = Variant(name="v1", model=names.pinned, version=1, weight=100)
        salts = Salts(variants=names.route, shadows=f"{names.route} shadows")
        route = Route(variants=(variant,), default="v1", salts=salts)
        (self._new / f"{names.route}.route.json").write_bytes(format_route(route))

    def _write_labels(self, path: Path, labels: Sequence[str]) -> None:
        if self._request.labels:
            shutil.copyfile(self._request.labels, path)
        else:
            path.write_text("".join(f"{label}\n" for label in labels))

    def _examination(self, labels: Sequence[str]) -> ExaminationRequest:
        folder = self._new / self._names.network
        return ExaminationRequest(
            model=self._names.network,
            candidate=self._version,
            document=read_pbtxt(folder / "config.pbtxt"),
            current=None,
            preprocess=self._new / self._names.preprocess,
            preprocess_version=1,
            labels=folder / candidate.LABELS if labels else None,
            gates=Gates(images=self._request.images),
        )

    def _report(self, line: str) -> None:
        self._workspace.report(line)

    def _progress(self, line: str) -> None:
        self._report(f"examination: {line}")
