"""A changed file and the code behind a command that takes it: `add`, `check`, `classify` and so on."""

import random
import re
import shutil
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx

from loadtest.attack import image_mutations, network_mutations
from nereid.application.exit_codes import reason
from nereid.base.errors import InvalidImage, OperationFailed, ServingError
from nereid.cli.image_commands.drawing import OutputFiles, draw
from nereid.client.result_kind import Timings
from nereid.gateway.failures import Failure
from nereid.gateway.http.upload import check_size
from nereid.gateway.settings import GatewaySettings
from nereid.models.publish import watch
from nereid.models.publish.add import AddRequest, Declined, add
from nereid.models.publish.drop_folder import DropFolder, journal_of
from nereid.models.publish.examination import ExaminationLimits
from nereid.models.publish.examiner import UNEXPECTED
from nereid.models.publish.publisher import publish
from nereid.repository.check import check
from nereid.tasks.read.line_images import UprightDecoder
from nereid.tasks.read.pdf import searchable
from nereid.tasks.read.result import PageSize, Reading, TextLine
from nereid.tasks.read.stages import StageTimes
from nereid.vision.imaging.decode import ImageLimits, read_upright_size
from nereid.vision.imaging.formats.image_header import read_header
from nereid.vision.imaging.preprocessor import CpuPreprocessor
from nereid.vision.imaging.transform import Transform
from tests.detectors import TestDetector
from tests.embedders import UNIT, convolutional
from tests.user_networks import UserNetwork

ANSWERED, REFUSED = "answered", "refused"
REFUSALS = (OperationFailed, ServingError, Failure, OSError)
# A reason with one of these words, or with a sentence twice, is not clear.
UNCLEAR = re.compile(
    rf"{UNEXPECTED}|well-formed network, got|unexpected [A-Z]\w+: |Traceback|not possible now"
)
# Of `nereid add`, each drawn now and then.
OPTIONS: Mapping[str, tuple[Any, ...]] = {
    "task": ("classify", "detect", "embed", "read"),
    "head": ("yolov5", "yolov8", "detr", "nms", "yolonas"),
    "activation": ("none", "softmax", "sigmoid"),
    "output": network_mutations.NAMES,
    "size": ((64, 64), (16, 16), (32, 48), (1, 1)),
}
NEXT_TO_IT = ("labels.txt", "classes.txt", "config.json", "preprocessor_config.json", "weights.bin")
OTHER_FILES = (
    *(b"", b"\0", b"version https://git-lfs.github.com/spec/v1\noid sha256:4d\n", b"<!DOCTYPE html>\n<html>"),
    *(b"PK\3\4" + bytes(40) + b"archive/data.pkl", b"\x80\2}q\0.", b"\x89HDF\r\n\x1a\n", b"{}", b"\xff\xfe"),
)
# One row per command: part of all cases.
PARTS = {
    **{"classify": 3, "read": 2, "document": 1, "detect": 3, "embed": 1},
    **{"check": 4, "add": 5, "publish": 2, "watch": 1},
}
GOOD_FILES = image_mutations.good_files()
PUBLISHED = {
    "c": UserNetwork().build(),
    "d": TestDetector("yolov8").build(),
    "e": convolutional(UNIT["operator"]),
}


SOURCE = ("read_text", "1", "", "", "", Timings(0, 0))


class Case(NamedTuple):
    """A file for a command: a name, and the bytes; `draw` decides the options."""

    command: str
    name: str
    content: bytes
    draw: random.Random


@dataclass(frozen=True, slots=True)
class Cases:
    """Draws cases by number; an equal seed gives the same ones again. `prepared` takes publications."""

    seed: int
    prepared: Path
    commands: Sequence[str] = tuple(PARTS)

    def case(self, number: int) -> Case:
        """Return a case."""
        draw = random.Random(f"{self.seed}/{number}")
        (command,) = draw.choices(self.commands, [PARTS[name] for name in self.commands])
        name, content = self._image(command, draw) if command in IMAGES else self._network(command, draw)
        return Case(command, name, content, draw)

    def _image(self, command: str, draw: random.Random) -> tuple[str, bytes]:
        known = image_mutations.good_documents() if command == "document" else GOOD_FILES
        return _changed(draw, known, [*network_mutations.bases().values()])

    def _network(self, command: str, draw: random.Random) -> tuple[str, bytes]:
        if draw.random() < 0.02:
            return "another file", draw.choice(OTHER_FILES)
        is_known = command in ("publish", "watch") and draw.random() < 0.8
        known = {name: model.SerializeToString() for name, model in PUBLISHED.items()} if is_known else None
        name, content = network_mutations.mutated(draw, known or network_mutations.bases())
        if draw.random() < 0.2:
            others = [*GOOD_FILES.values(), *network_mutations.bases().values()]
            more, content = _changed(draw, {name: content}, others)
            return f"{name}; {more}", content
        return name, content

    def outcome(self, case: Case) -> str:
        """Run a case; return `answered`, `refused`, or what is wrong."""
        run = IMAGES.get(case.command) or getattr(self, f"_{case.command}")
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / "in"
            folder.mkdir()
            (folder / "net.onnx").write_bytes(case.content)
            if case.draw.random() < 0.2:
                text = case.draw.choice(network_mutations.TEXTS).encode(errors="surrogatepass")
                path = folder / case.draw.choice(NEXT_TO_IT)
                path.write_bytes(case.draw.choice((text, *OTHER_FILES)))
            try:
                run(case, folder, Path(scratch) / "models")
            except Declined:
                return ANSWERED
            except REFUSALS as error:
                return _judged(reason(error))
            except Exception as error:
                frame = traceback.extract_tb(error.__traceback__)[-1]
                location = f"{Path(frame.filename).name}:{frame.lineno}"
                return f"traceback: {type(error).__name__} at {location}: {error}"[:400]
        return ANSWERED

    def _check(self, case: Case, folder: Path, repository: Path) -> None:
        version = repository / "m" / "1"
        version.parent.mkdir(parents=True)
        (folder / "net.onnx").rename(folder / "model.onnx")
        shutil.copytree(folder, version)
        if case.draw.random() < 0.7:
            batch = case.draw.choice(("", "max_batch_size: 4", 'input { name: "image" }'))
            (repository / "m" / "config.pbtxt").write_text(f'backend: "onnxruntime" {batch}')
        problems = [finding.found for finding in check(repository) if finding.verdict == "fail"]
        if problems:
            raise OperationFailed("; ".join(dict.fromkeys(problems)))

    def _add(self, case: Case, folder: Path, repository: Path) -> None:
        draw, options = case.draw, dict[str, Any]()
        for name, values in OPTIONS.items():
            if draw.random() < 0.1:
                options[name] = draw.choice(values)
        if draw.random() < 0.1:
            options["labels"] = folder.parent / "names"
            options["labels"].write_bytes(draw.choice((b"a\nb\nc\n", b"\0", b"", b"\xff\xfe")))
        is_reader = options.get("task") == "read" or "recogniser" in case.name
        parameters = {} if is_reader else {"preset": draw.choice(("imagenet", "yolo"))}
        request = AddRequest(folder, "m", parameters, profiles=("cpu",), **options)
        add(repository, request, None, confirm=lambda _: False)

    def _publish(self, case: Case, folder: Path, repository: Path) -> None:
        shutil.copytree(self.prepared, repository)
        publish(
            repository,
            self._model(case),
            folder,
            None,
            ExaminationLimits(is_change_accepted=case.draw.random() < 0.5),
        )

    def _watch(self, case: Case, folder: Path, repository: Path) -> None:
        shutil.copytree(self.prepared, repository)
        said, drops = list[str](), folder.parent / "drops"
        drops.mkdir()
        shutil.move(folder / "net.onnx", drops / f"{self._model(case)}.onnx")
        publication = watch.publication(repository, lambda: None, ExaminationLimits(), 0.0, lambda line: None)
        with journal_of(drops).locked() as append:
            dropped = DropFolder(
                drops,
                append,
                folder.parent / "staging",
                publication,
                settle_s=0,
                announce=said.append,
                report=said.append,
            )
            for _ in range(3):
                dropped.step()
        if problems := [line for line in said if ": rejected: " in line or "not possible now" in line]:
            raise OperationFailed(problems[0])

    def _model(self, case: Case) -> str:
        name = case.name.partition(":")[0]
        return name if name in PUBLISHED else "c"


def prepare(repository: Path) -> None:
    """Fill a repository with a classifier, a detector and an embedder to publish to."""
    for name, model in PUBLISHED.items():
        path = repository.parent / f"{name}.onnx"
        onnx.save(model, path)
        add(repository, AddRequest(path, name, {"preset": "imagenet"}, profiles=("cpu",)), None)


def _changed(draw: random.Random, known: Mapping[str, bytes], others: list[bytes]) -> tuple[str, bytes]:
    """Return a name, and one of the known files with changed bytes."""
    name = draw.choice([*known])
    change = draw.choice(image_mutations.MUTATIONS if len(known) > 1 else image_mutations.ANY_FILE)
    numbers = np.random.default_rng(draw.getrandbits(32))
    if not known[name]:
        return name, b""
    try:
        return f"{name}, {change.__name__}", bytes(change(bytearray(known[name]), numbers, others))
    except ValueError:  # no place for the change
        return name, known[name]


def _judged(text: str) -> str:
    sentences = text.split("; ")
    is_repeated = len({*sentences}) < len(sentences)
    return f"unclear: {text}"[:400] if is_repeated or not text or UNCLEAR.search(text) else REFUSED


def _classify(case: Case, folder: Path, repository: Path) -> None:
    limits = GatewaySettings(
        max_pixels=ImageLimits().max_image_pixels, max_side_px=ImageLimits().max_image_side_px
    )
    check_size(read_header(case.content), limits)
    preprocessor = CpuPreprocessor(Transform(64, 64, resize="letterbox"), ImageLimits(), 1)
    (error,) = preprocessor.prepare([case.content])
    if error:
        raise error
    try:
        image = folder / "net.onnx"
        draw(image, [], OutputFiles("--draw", folder / "drawn", (".png",), 0).path_of(image))
    except OSError as error:
        raise ValueError(f"the pixels were decoded, but not drawn: {error}") from None


def _read(case: Case, folder: Path, repository: Path) -> None:
    UprightDecoder(ImageLimits())(case.content, StageTimes())


def _document(case: Case, folder: Path, repository: Path) -> None:
    pages = UprightDecoder(ImageLimits(), 20).pages(case.content, StageTimes())
    sizes = tuple(PageSize(*page.size_wh) for page in pages)
    lines = (TextLine("text 文", 0.9, ((9.0, 9.0), (99.0, 9.0), (99.0, 20.0), (9.0, 20.0))),)
    try:
        searchable(case.content, Reading(lines, (), (), *SOURCE, pages=sizes))
    except InvalidImage as error:
        raise ValueError(f"the pages were read, but not written: {error}") from None


def _detect(case: Case, folder: Path, repository: Path) -> None:
    _classify(case, folder, repository)
    try:
        read_upright_size(case.content, ImageLimits())
    except InvalidImage as error:
        raise ValueError(f"the pixels were decoded, but not the size: {error}") from None


IMAGES: Mapping[str, Callable[[Case, Path, Path], None]] = {
    "classify": _classify,
    "read": _read,
    "detect": _detect,
    "document": _document,
    "embed": _classify,
}
