"""`nereid add`: from an ONNX file to a public name that answers."""

import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from msgspec.structs import replace as with_fields

from nereid.assets import SAMPLES
from nereid.config.model_config import read_pbtxt
from nereid.errors import OperationFailed, WrongUsage
from nereid.imaging.preprocess_settings import PRESETS
from nereid.inference.signature import NetworkTensor
from nereid.publish import candidate
from nereid.publish.configs import Addition, Names, Tensor
from nereid.publish.engine.actions import Action, Install, Load, Warm, Workspace
from nereid.publish.engine.engine import begin, commit, locked_repository
from nereid.publish.examination.examine import ExaminationRequest, Report, examine
from nereid.repository import onnx_file
from nereid.repository.check import check
from nereid.repository.onnx_file import append_softmax, describe
from nereid.routing.assignment import Route, Salts, Variant, format_route
from nereid.server.run_dir import ServerRecord

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,50}")
PROFILES = ("cpu", "gpu")
PIXELS = ("TYPE_FP32", "TYPE_FP16", "TYPE_UINT8")
SCORES = ("TYPE_FP32", "TYPE_FP16", "TYPE_FP64")
CHANNELS = 3
# What a preset resizes to is meant for this side; others keep the proportion.
USUAL_SIDE_PX = 224


@dataclass(frozen=True, slots=True)
class AddRequest:
    """What is to be made of an ONNX file.

    Args:
        source: the file, or a folder with it and its external data.
        name: the public one.
        preset: of the preprocessing.
        labels: a file with one class a line.
        with_softmax: whether one is appended, for networks that give logits.
        size_px: height and width of the input, for a network that takes any.
        output: which one gives the scores, for a network that has several.
        profiles: the hardware profiles that configs are written for.
    """

    source: Path
    name: str
    preset: str
    labels: Path | None = None
    with_softmax: bool = False
    size_px: int = 0
    output: str = ""
    profiles: tuple[str, ...] = PROFILES


@dataclass(frozen=True, slots=True)
class Added:
    """A public name that is served now, its models, and what was measured of its network."""

    name: str
    models: tuple[str, ...]
    report: Report
    seconds: float


def add(
    repository: Path,
    wish: AddRequest,
    record: ServerRecord | None,
    report: Callable[[str], None] = lambda line: None,
) -> Added:
    """Make an ONNX file a public name: network, preprocessing, pinned model and route, and load them.

    Killed at any point, the next command that changes the repository finishes it, or undoes it.

    Raises:
        WrongUsage: the wish does not fit the file, or the name is taken.
        OperationFailed: the network is rejected, or the server refuses a model: nothing has changed.
        OSError: a file cannot be read or written.
    """
    start = time.monotonic()
    _check_wish(repository, wish)
    repository.mkdir(parents=True, exist_ok=True)
    with locked_repository(repository, record, report) as (log, at):
        operation, site = begin(log, at, "add", wish.name, 1)
        names = Names(wish.name)
        try:
            _check_names(site.repository, names)
            measured = _stage(wish, names, operation.user, site)
        except BaseException as error:
            log.write("undone", operation, str(error))
            raise
        commit(log, with_fields(operation, actions=_actions(names)), site)
        models = (names.network, names.preprocess, names.pinned, names.route)
        return Added(wish.name, models, measured, time.monotonic() - start)


def _check_wish(repository: Path, wish: AddRequest) -> None:
    if not NAME.fullmatch(wish.name):
        raise WrongUsage(f"a name has letters, digits, '.', '_' and '-', got '{wish.name}'")
    if wish.preset not in PRESETS:
        raise WrongUsage(f"preset must be one of {', '.join(PRESETS)}, got '{wish.preset}'")
    if unknown := [each for each in wish.profiles if each not in PROFILES]:
        raise WrongUsage(f"profile must be one of {', '.join(PROFILES)}, got '{unknown[0]}'")
    if wish.labels and not wish.labels.is_file():
        raise WrongUsage(f"{wish.labels} is no file")
    if repository.exists() and not repository.is_dir():
        raise WrongUsage(f"{repository} is no folder")


def _check_names(repository: Path, names: Names) -> None:
    for name in (names.route, names.network, names.preprocess, names.pinned):
        if (repository / name).exists():
            raise WrongUsage(
                f"{repository} has a model '{name}' already; "
                f"fix: nereid publish {names.route} for a new version, or another --name"
            )
    route = repository / f"{names.route}.route.json"
    if route.exists():
        raise WrongUsage(
            f"{repository} has a file '{route.name}' already; fix: put it elsewhere, or another --name"
        )


def _actions(names: Names) -> tuple[Action, ...]:
    """Return what is to be done: whatever a server that starts meanwhile finds can be loaded."""
    return (
        Install(names.network, names.network),
        Install(names.preprocess, names.preprocess),
        Install(names.pinned, names.pinned),
        Install(f"{names.route}.route.json"),
        Load(names.network, 1),
        Load(names.preprocess, 1),
        Load(names.pinned, 1),
        Warm(names.pinned, 1),
        Install(names.route, names.route),
        Load(names.route, 1),
        Warm(names.route, 1),
    )


def _stage(wish: AddRequest, names: Names, user: str, site: Workspace) -> Report:
    """Write all that comes into the repository, and examine it."""
    new = site.staging / "new"
    version = new / names.network / "1"
    candidate.stage(wish.source, version, "model.onnx")
    if wish.with_softmax:
        wish = replace(wish, output=append_softmax(version / "model.onnx", wish.output))
    addition = _describe(version / "model.onnx", wish, names)
    _write(new, addition, wish)
    _check(new)
    site.report(f"{wish.source.name}: staged as '{names.network}', with its preprocessing and route")
    measured = examine(_question(new, names, wish), progress=site.report)
    for note in measured.notes:
        site.report(f"note: {note}")
    candidate.write_checksums(version, wish.source, user)
    return measured


def _describe(path: Path, wish: AddRequest, names: Names) -> Addition:
    """Read the network's tensors.

    Raises:
        WrongUsage: it is no network that takes images and gives scores.
    """
    signature = onnx_file.read(path).signature
    taken, parameters = _taken(signature.inputs, wish)
    given = _given(signature.outputs, wish)
    return Addition(names, taken, given, (("preset", wish.preset), *parameters), wish.labels is not None)


def _taken(inputs: Mapping[str, NetworkTensor], wish: AddRequest) -> tuple[Tensor, list[tuple[str, str]]]:
    if len(inputs) != 1:
        raise WrongUsage(f"the network must have one input, for images, it has: {', '.join(inputs)}")
    ((name, tensor),) = inputs.items()
    is_last = tensor.shape[-1:] == (CHANNELS,) and tensor.shape[1:2] != (CHANNELS,)
    sides = tensor.shape[1:3] if is_last else tensor.shape[2:4]
    channels = tensor.shape[3:4] if is_last else tensor.shape[1:2]
    if len(tensor.shape) != 4 or channels not in ((CHANNELS,), (-1,)) or tensor.datatype not in PIXELS:
        raise WrongUsage(
            f"input '{name}': expected FP32, FP16 or UINT8 [-1,3,height,width] or [-1,height,width,3], "
            f"got {describe(tensor)}"
        )
    _check_batch("input", name, tensor)
    height, width = (wish.size_px if side == -1 else side for side in sides)
    if not height or not width:
        raise WrongUsage(
            f"input '{name}' is {describe(tensor)}; fix: say with --size how large images are to be"
        )
    if wish.size_px and (height, width) != (wish.size_px, wish.size_px):
        raise WrongUsage(f"input '{name}': expected {height} x {width} pixels, got --size {wish.size_px}")
    dims = (height, width, CHANNELS) if is_last else (CHANNELS, height, width)
    return Tensor(name, tensor.datatype, dims), _parameters(wish.preset, height, width, is_last)


def _parameters(preset: str, height: int, width: int, is_last: bool) -> list[tuple[str, str]]:
    """Return what a preset does not say: the layout, and how far to resize for an unusual side."""
    found = [("layout", "NHWC")] if is_last else []
    usual = PRESETS[preset].get("resize_shorter_px")
    if usual and max(height, width) != USUAL_SIDE_PX:
        found.append(("resize_shorter_px", str(round(int(usual) * max(height, width) / USUAL_SIDE_PX))))
    return found


def _given(outputs: Mapping[str, NetworkTensor], wish: AddRequest) -> Tensor:
    names = [wish.output] if wish.output else [*outputs]
    if len(names) != 1 or names[0] not in outputs:
        raise WrongUsage(f"say with --output which one gives the scores: {', '.join(outputs)}")
    (name,) = names
    tensor = outputs[name]
    if len(tensor.shape) != 2 or tensor.shape[1] < 1 or tensor.datatype not in SCORES:
        raise WrongUsage(f"output '{name}': expected FP32 [-1,classes], got {describe(tensor)}")
    _check_batch("output", name, tensor)
    return Tensor(name, tensor.datatype, tensor.shape[1:])


def _check_batch(side: str, name: str, tensor: NetworkTensor) -> None:
    if not tensor.can_batch:
        raise WrongUsage(
            f"{side} '{name}' is {describe(tensor)}: expected -1 first, for any number of images; fix: "
            f"export it with a dynamic batch (torch.onnx.export: dynamic_axes={{'{name}': {{0: 'N'}}, …}})"
        )


def _write(new: Path, addition: Addition, wish: AddRequest) -> None:
    names = addition.names
    files = {
        names.network: {"": addition.network(), "gpu": addition.network_on_gpu()},
        names.preprocess: {"": addition.preprocess(), "gpu": addition.preprocess_on_gpu()},
        names.pinned: {"": addition.pinned(), "cpu": addition.pinned_on_cpu()},
        names.route: {"": addition.route()},
    }
    for name, texts in files.items():
        folder = new / name
        (folder / "1").mkdir(parents=True, exist_ok=True)
        for profile, text in texts.items():
            if not profile or profile in wish.profiles:
                path = folder / "configs" / f"{profile}.pbtxt" if profile else folder / "config.pbtxt"
                path.parent.mkdir(exist_ok=True)
                path.write_text(text)
        if name != names.network:
            (folder / "1" / ".gitkeep").touch()
        if wish.labels and name != names.preprocess:
            shutil.copyfile(wish.labels, folder / candidate.LABELS)
    variant = Variant(name="v1", model=names.pinned, version=1, weight=100)
    salts = Salts(variants=names.route, shadows=f"{names.route} shadows")
    route = Route(variants=(variant,), default="v1", salts=salts)
    (new / f"{names.route}.route.json").write_bytes(format_route(route))


def _check(new: Path) -> None:
    """Look at what is staged as `nereid check` does at a repository."""
    if failures := [finding for finding in check(new) if finding.verdict == "fail"]:
        raise OperationFailed("; ".join(f"{each.model}, {each.what}: {each.found}" for each in failures))


def _question(new: Path, names: Names, wish: AddRequest) -> ExaminationRequest:
    return ExaminationRequest(
        model=names.network,
        candidate=new / names.network / "1",
        document=read_pbtxt(new / names.network / "config.pbtxt"),
        current=None,
        preprocess=new / names.preprocess,
        preprocess_version=1,
        images=SAMPLES,
        tolerance=0,
        accept_change=True,
        max_slowdown=0,
        max_memory_ratio=0,
        labels=new / names.network / candidate.LABELS if wish.labels else None,
    )
