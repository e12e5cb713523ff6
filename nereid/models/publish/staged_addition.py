"""The new files of an addition: staged, examined, and described as a proposal."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nereid.backends.routing.assignment import Route, Salts, Variant, format_route
from nereid.base.config.model_config import ModelConfig
from nereid.base.errors import OperationFailed, WrongUsage
from nereid.base.serving_errors import InvalidConfig, InvalidImage
from nereid.models.publish import candidate
from nereid.models.publish.configs import Addition, Names
from nereid.models.publish.engine.actions import Workspace
from nereid.models.publish.examination.examine import (
    ExaminationRequest,
    FoundObject,
    Gates,
    Report,
    Survey,
    examine,
    survey,
)
from nereid.models.publish.intake import description, network_facts
from nereid.models.publish.intake.adaptation import ActivationRule, Adapted, Choices
from nereid.models.publish.intake.chosen_task import Task, choose_task
from nereid.models.publish.intake.description import Description
from nereid.models.publish.intake.image_input import PROCESS_BYTES
from nereid.models.publish.intake.network_facts import ANY_SIZE, NetworkFacts, Size
from nereid.models.publish.intake.serving_settings import ServingSettings
from nereid.models.publish.pinned import examination_request
from nereid.repository import fitting, onnx_file
from nereid.repository.check import check
from nereid.repository.labels import check_names, read_lines
from nereid.repository.layout import Pin, pins, readable_configs
from nereid.tasks.read.intake import ReaderModels, copy_companions
from nereid.vision.imaging.preprocess_settings import PreprocessSettings
from nereid.vision.imaging.preprocessor import Preview, preview

PROFILES = ("cpu", "gpu")
Models = Addition | ReaderModels


@dataclass(frozen=True, slots=True)
class AddRequest:
    """The ONNX file to add, and the properties of its models.

    Args:
        source: the file, or a folder with it and its external data.
        name: the public name.
        parameters: parameters of the preprocessing, a `preset` among them.
        labels: a file with one class or character per line; None for the names in the file's metadata.
        activation: function to append to the scores; `auto` decides after a run.
        size: height and width of the input in pixels, for a network that accepts any size; zeros for those
            of the file or its metadata.
        output: the output with the scores, for a network with several outputs.
        profiles: hardware profiles to write configs for.
        instances: processes of the pinned model on a CPU; None for those that fit the machine.
        is_replacing: whether models of that name are removed first.
        images: photos whose top classes, objects or lines are shown; () for those of the task.
        preview: PNG file to write, with what the network sees of the photos.
        task: `classify`, `detect` or `read`; empty to find it from the file.
        head: layout of a detector's outputs; empty to find it from names and shapes.
        last_step: parameters of the model after the network, such as `score_threshold`.
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
    last_step: Mapping[str, str] = field(default_factory=dict)

    @property
    def choices(self) -> Choices:
        """The choices about the network."""
        labels = read_lines(self.labels) if self.labels else ()
        return Choices(self.size, self.output, self.activation, self.head, self.last_step, labels)


@dataclass(frozen=True, slots=True)
class Proposal:
    """A model before it is added: how its file is read, what changes, and what it costs.

    Args:
        task: of the network.
        settings: input and outputs of the network, and its preprocessing.
        about: rows for the screen: a word, and what the network returns.
        parameters_from: origin of those that the request does not contain; empty if there are none.
        value_range: smallest and largest number that the network receives for the photos; None without
            a preprocessing of its own.
        labels: class names, or characters; empty if there are none.
        labels_from: their origin.
        changes: what is changed in the file, one sentence each.
        report: measurements.
        processes, memory_bytes: those that a server with the profile `cpu` gets.
        top_classes: per image the indices of the largest scores, the largest first.
        objects: per image the objects, the best score first.
        lines: per image the lines of text.
        models: those behind the route, in the order of their loading.
        unit: one row of the network's batch, in words.
        shared: default models that are used, too, and are in the repository already.
    """

    task: str
    settings: ServingSettings
    about: Sequence[tuple[str, str]]
    parameters_from: str
    value_range: tuple[float, float] | None
    labels: Sequence[str]
    labels_from: str
    changes: Sequence[str]
    report: Report
    processes: int
    memory_bytes: int
    top_classes: Mapping[str, Sequence[int]]
    objects: Mapping[str, Sequence[FoundObject]]
    lines: Mapping[str, Sequence[str]]
    models: tuple[str, ...]
    unit: str
    shared: tuple[str, ...]


class Staging:
    """The new files of an addition, written step by step to the staging folder."""

    def __init__(self, request: AddRequest, names: Names, workspace: Workspace) -> None:
        self._request, self._names, self._workspace = request, names, workspace
        self._new = workspace.staging / "new"
        self._version = self._new / names.network / "1"
        self._network = self._version / "model.onnx"
        self._images = request.images

    def stage(self, user: str) -> Proposal:
        """Write all files, and examine the network."""
        request, names = self._request, self._names
        origin = candidate.network_file(request.source, "model.onnx").resolve()
        candidate.stage(request.source, self._version, "model.onnx")
        facts = network_facts.read(origin.parent, onnx_file.read(self._network))
        task = choose_task(request.task, facts, request.size if any(request.size) else facts.noted.size)
        choices = task.input.with_notes(request.choices, facts)
        self._images = tuple(dict.fromkeys(request.images or task.input.samples))
        content = self._network.read_bytes()
        adapted = task.adapt(self._network, choices)
        read = self._settings(task, facts, adapted, choices)
        labels, labels_from = self._labels(task, facts, read.classes)
        parameters, parameters_from = task.input.preprocessing(read, facts.noted, request.parameters)
        shared = copy_companions(task.input.companions, names.route, self._workspace.repository, self._new)
        settings = replace(
            read,
            parameters=parameters,
            has_labels=bool(labels),
            instances=request.instances,
            companions=shared,
        )
        self._write(task, settings, labels)
        seen_by_network = self._preview()
        self._report(f"{request.source.name}: staged as '{names.network}'")
        seen = survey(self._examination(), progress=self._progress)
        if (activation := task.activation(choices, seen)) != "none":
            self._network.write_bytes(content)
            adapted = task.adapt(self._network, choices, activation)
            settings = replace(settings, outputs=self._settings(task, facts, adapted, choices).outputs)
            if seen.lines:  # the reader leaves out lines by their probabilities, which have changed
                seen = survey(self._examination(), progress=self._progress)
        settings = replace(settings, can_batch=seen.can_batch)
        models = self._write(task, settings, labels)
        measured = self._examine(adapted.notes)
        changes = tuple(adapted.changes)
        rule = (request.output, request.activation)
        about = Description(request.source.name, facts.sha256, *rule, changes, task.name, settings.head)
        self._describe(about, user)
        return self._proposal(
            task,
            settings,
            seen.served_with(activation),
            measured,
            parameters_from=parameters_from,
            value_range=(seen_by_network.lowest, seen_by_network.highest) if seen_by_network else None,
            labels=labels,
            labels_from=labels_from,
            changes=changes,
            models=(*(each for each in shared if not self._is_there(each)), *[*models.configs()][:-1]),
            shared=tuple(filter(self._is_there, shared)),
        )

    def _describe(self, about: Description, user: str) -> None:
        description.write(self._version, about)
        candidate.write_checksums(self._version, self._request.source, user)

    def _proposal(
        self, task: Task, settings: ServingSettings, seen: Survey, measured: Report, **origins: Any
    ) -> Proposal:
        request = self._request
        own_bytes = {request.name: task.input.process_bytes(0)} if self._examination().reader else {}
        alone = fitting.counts({request.name: 1.0}, fitting.Machine.present(), own_bytes).counts
        instances = request.instances or alone[request.name]
        names = _titles(self._images)
        return Proposal(
            task=task.name,
            settings=settings,
            about=task.rows(settings, seen),
            report=measured,
            processes=instances + 1,
            memory_bytes=instances * task.input.process_bytes(measured.memory_bytes) + PROCESS_BYTES,
            top_classes=dict(zip(names, seen.top_classes, strict=False)),
            objects=dict(zip(names, seen.objects, strict=False)),
            lines=dict(zip(names, seen.lines, strict=False)),
            unit=task.input.unit,
            **origins,
        )

    def _settings(
        self, task: Task, facts: NetworkFacts, adapted: Adapted, choices: Choices
    ) -> ServingSettings:
        signature = onnx_file.read(self._network).signature
        return task.settings(facts, signature, adapted.outputs, choices, len(choices.labels or facts.labels))

    def _labels(self, task: Task, facts: NetworkFacts, classes: int) -> tuple[tuple[str, ...], str]:
        """Return the class names and their origin; names of the metadata that do not fit are left out."""
        path, (labels, origin) = self._request.labels, task.input.labels(facts)
        if path:
            labels, origin = read_lines(path, classes), f"'{path.name}'"
        if task.input.unit != "line":  # a control character may be one that a network reads
            check_names(labels, origin)
        if labels and classes and len(labels) != classes:
            self._report(
                f"note: {origin} has {len(labels)} class names, but the network has "
                f"{classes} classes; they are not used"
            )
            return (), ""
        return labels, origin

    def _is_there(self, model: str) -> bool:
        return (self._workspace.repository / model).exists()

    def _preview(self) -> Preview | None:
        """Preprocess the photos before the network runs, and write what it will see.

        Raises:
            WrongUsage: a parameter is unknown or invalid, or a photo cannot be read.
        """
        request = self._request
        if not (name := self._pin().preprocess):
            if request.preview:
                raise WrongUsage("a recogniser has no preview of whole images; fix: leave out --preview")
            return None
        try:
            config = ModelConfig.from_file(self._new / name, 1)
            settings = PreprocessSettings.from_config(config)
            found = preview(settings, {str(path): path.read_bytes() for path in self._images})
        except InvalidConfig as error:
            text = str(error).partition(f"model '{name}': ")
            raise WrongUsage(f"preprocessing: {text[2] or text[0]}") from None
        except InvalidImage as error:
            raise WrongUsage(f"--images: {error}") from None
        if request.preview:
            request.preview.write_bytes(found.png)
            self._report(f"preview: '{request.preview}' shows what the network sees of each photo")
        return found

    def _write(self, task: Task, settings: ServingSettings, labels: Sequence[str]) -> Models:
        names = self._names
        models: Models = task.models(names, settings, self._request.choices)
        for name, texts in models.configs().items():
            folder = self._new / name
            (folder / "1").mkdir(parents=True, exist_ok=True)
            for profile, text in texts.items():
                if not profile or profile in self._request.profiles:
                    path = folder / "configs" / f"{profile}.pbtxt" if profile else folder / "config.pbtxt"
                    path.parent.mkdir(exist_ok=True)
                    path.write_text(text)
            if name != names.network:
                (folder / "1" / ".gitkeep").touch()
            if name in models.labelled:
                lines = "".join(f"{label}\n" for label in labels)
                (folder / candidate.LABELS).write_text(lines, encoding="utf-8")
        variant = Variant("v1", names.pinned, 1, 100, deadline_ms=models.deadline_ms)
        salts = Salts(variants=names.route, shadows=f"{names.route} shadows")
        route = Route(variants=(variant,), default="v1", salts=salts)
        (self._new / f"{names.route}.route.json").write_bytes(format_route(route))
        return models

    def _examine(self, notes: Sequence[str]) -> Report:
        """Check the files as a server would, and examine the network; the notes are the first of the report.

        Raises:
            OperationFailed: a model cannot be loaded, or the network is rejected.
        """
        if failures := [finding for finding in check(self._new) if finding.verdict == "fail"]:
            first = {each.found: each for each in reversed(failures)}  # several files may have one fault
            raise OperationFailed(
                "; ".join(f"{each.model}, {each.what}: {found}" for found, each in first.items())
            )
        measured = examine(self._examination(), progress=self._progress)
        measured = replace(measured, notes=(*notes, *measured.notes))
        for note in measured.notes:
            self._report(f"note: {note}")
        return measured

    def _pin(self) -> Pin:
        (found,) = [
            pin for pin in pins(self._new, readable_configs(self._new)) if pin.model == self._names.pinned
        ]
        return found

    def _examination(self) -> ExaminationRequest:
        folder, gates = self._new / self._names.network, Gates(images=self._images)
        return examination_request(folder, self._version, None, self._pin(), gates)

    def _report(self, line: str) -> None:
        self._workspace.report(line)

    def _progress(self, line: str) -> None:
        self._report(f"examination: {line}")


def _titles(images: Sequence[Path]) -> list[str]:
    """Return the names of files; if two of them are equal, their paths as given."""
    names = [each.name for each in images]
    return [name if names.count(name) == 1 else str(each) for name, each in zip(names, images, strict=True)]
