"""Addition of an ONNX file under a public name: network, preprocessing, pinned model and route."""

import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from msgspec.structs import replace as with_fields

from nereid.config.model_config import read_pbtxt
from nereid.errors import OperationFailed, WrongUsage
from nereid.imaging.preprocess_settings import PRESETS
from nereid.inference.signature import NetworkTensor
from nereid.publish import candidate
from nereid.publish.configs import Addition, Names, Tensor
from nereid.publish.engine.actions import Action, Install, Load, Warm, Workspace
from nereid.publish.engine.engine import begin, commit, locked_repository
from nereid.publish.examination.examine import ExaminationRequest, Report, examine
from nereid.publish.publisher import Published
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
# The presets' `resize_shorter_px` is for this side; other sides scale it in proportion.
USUAL_SIDE_PX = 224


@dataclass(frozen=True, slots=True)
class AddRequest:
    """The ONNX file to add, and the properties of its models.

    Args:
        source: the file, or a folder with it and its external data.
        name: the public name.
        preset: name of the preprocessing preset.
        labels: a file with one class per line.
        with_softmax: whether to append a softmax, for networks that return logits.
        size_px: height and width of the input, for a network that accepts any size.
        output: the output with the scores, for a network with several outputs.
        profiles: hardware profiles to write configs for.
    """

    source: Path
    name: str
    preset: str
    labels: Path | None = None
    with_softmax: bool = False
    size_px: int = 0
    output: str = ""
    profiles: tuple[str, ...] = PROFILES


def add(
    repository: Path,
    request: AddRequest,
    record: ServerRecord | None,
    report: Callable[[str], None] = lambda line: None,
) -> Published:
    """Write network, preprocessing, pinned model and route for an ONNX file, and load them.

    If it is killed, the next command that changes the repository finishes or undoes the addition.

    Raises:
        WrongUsage: the request does not fit the file, or the name is taken.
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
            _check_names(workspace.repository, names)
            measured = _stage(request, names, operation.user, workspace)
        except BaseException as error:
            log.write("undone", operation, str(error))
            raise
        commit(log, with_fields(operation, actions=_actions(names)), workspace)
        return Published(names.network, 1, (names.pinned,), measured, time.monotonic() - start)


def _check_request(repository: Path, request: AddRequest) -> None:
    if not NAME.fullmatch(request.name):
        raise WrongUsage(
            f"invalid name: expected at most 51 letters, digits, '.', '_' and '-', got '{request.name}'"
        )
    if request.preset not in PRESETS:
        raise WrongUsage(f"invalid preset: expected one of {', '.join(PRESETS)}, got '{request.preset}'")
    if unknown := [each for each in request.profiles if each not in PROFILES]:
        raise WrongUsage(f"invalid profile: expected one of {', '.join(PROFILES)}, got '{unknown[0]}'")
    if request.labels and not request.labels.is_file():
        raise WrongUsage(f"label file '{request.labels}' does not exist")
    if repository.exists() and not repository.is_dir():
        raise WrongUsage(f"'{repository}' is not a folder; fix: name a model repository, or nereid init DIR")


def _check_names(repository: Path, names: Names) -> None:
    for name in reversed(names):
        if (repository / name).exists():
            raise WrongUsage(
                f"'{repository}' already has a model '{name}'; "
                f"fix: nereid publish {names.route} for a new version, or another --name"
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


def _stage(request: AddRequest, names: Names, user: str, workspace: Workspace) -> Report:
    """Write all new files to the staging folder, and examine the network."""
    new = workspace.staging / "new"
    version = new / names.network / "1"
    candidate.stage(request.source, version, "model.onnx")
    if request.with_softmax:
        request = replace(request, output=append_softmax(version / "model.onnx", request.output))
    signature = onnx_file.read(version / "model.onnx").signature
    image, parameters = _input(signature.inputs, request)
    scores = _output(signature.outputs, request)
    _write(new, Addition(names, image, scores, parameters, request.labels is not None), request)
    if failures := [finding for finding in check(new) if finding.verdict == "fail"]:
        raise OperationFailed("; ".join(f"{each.model}, {each.what}: {each.found}" for each in failures))
    workspace.report(f"{request.source.name}: staged as '{names.network}', with its preprocessing and route")
    measured = examine(
        _examination_request(new, names, request),
        progress=lambda line: workspace.report(f"examination: {line}"),
    )
    for note in measured.notes:
        workspace.report(f"note: {note}")
    candidate.write_checksums(version, request.source, user)
    return measured


def _input(inputs: Mapping[str, NetworkTensor], request: AddRequest) -> tuple[Tensor, list[tuple[str, str]]]:
    if len(inputs) != 1:
        raise WrongUsage(f"expected a network with one input, for images, got: {', '.join(inputs)}")
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
    height, width = (request.size_px if side == -1 else side for side in sides)
    if not height or not width:
        raise WrongUsage(
            f"input '{name}' has no fixed size, {describe(tensor)}; fix: set height and width with --size"
        )
    if request.size_px and (height, width) != (request.size_px, request.size_px):
        raise WrongUsage(f"input '{name}': expected {height} x {width} pixels, got --size {request.size_px}")
    dims = (height, width, CHANNELS) if is_last else (CHANNELS, height, width)
    return Tensor(name, tensor.datatype, dims), _parameters(request.preset, height, width, is_last)


def _parameters(preset: str, height: int, width: int, is_last: bool) -> list[tuple[str, str]]:
    """Return the preset, and what differs from it: the layout, and the resize for an unusual side."""
    found = [("preset", preset)] + [("layout", "NHWC")] * is_last
    usual = PRESETS[preset].get("resize_shorter_px")
    if usual and max(height, width) != USUAL_SIDE_PX:
        found.append(("resize_shorter_px", str(round(int(usual) * max(height, width) / USUAL_SIDE_PX))))
    return found


def _output(outputs: Mapping[str, NetworkTensor], request: AddRequest) -> Tensor:
    names = [request.output] if request.output else [*outputs]
    if len(names) != 1 or names[0] not in outputs:
        raise WrongUsage(
            f"expected one output with scores, got: {', '.join(outputs)}; fix: name one with --output"
        )
    (name,) = names
    tensor = outputs[name]
    if len(tensor.shape) != 2 or tensor.shape[1] < 1 or tensor.datatype not in SCORES:
        raise WrongUsage(f"output '{name}': expected FP32 [-1,classes], got {describe(tensor)}")
    _check_batch("output", name, tensor)
    return Tensor(name, tensor.datatype, tensor.shape[1:])


def _check_batch(side: str, name: str, tensor: NetworkTensor) -> None:
    if not tensor.can_batch:
        raise WrongUsage(
            f"{side} '{name}': expected -1 as first dim, for any batch size, got {describe(tensor)}; "
            f"fix: export it with torch.onnx.export(…, dynamic_axes={{'{name}': {{0: 'N'}}, …}})"
        )


def _write(new: Path, addition: Addition, request: AddRequest) -> None:
    names = addition.names
    for name, texts in addition.configs().items():
        folder = new / name
        (folder / "1").mkdir(parents=True, exist_ok=True)
        for profile, text in texts.items():
            if not profile or profile in request.profiles:
                path = folder / "configs" / f"{profile}.pbtxt" if profile else folder / "config.pbtxt"
                path.parent.mkdir(exist_ok=True)
                path.write_text(text)
        if name != names.network:
            (folder / "1" / ".gitkeep").touch()
        if request.labels and name != names.preprocess:
            shutil.copyfile(request.labels, folder / candidate.LABELS)
    variant = Variant(name="v1", model=names.pinned, version=1, weight=100)
    salts = Salts(variants=names.route, shadows=f"{names.route} shadows")
    route = Route(variants=(variant,), default="v1", salts=salts)
    (new / f"{names.route}.route.json").write_bytes(format_route(route))


def _examination_request(new: Path, names: Names, request: AddRequest) -> ExaminationRequest:
    return ExaminationRequest(
        model=names.network,
        candidate=new / names.network / "1",
        document=read_pbtxt(new / names.network / "config.pbtxt"),
        current=None,
        preprocess=new / names.preprocess,
        preprocess_version=1,
        labels=new / names.network / candidate.LABELS if request.labels else None,
    )
