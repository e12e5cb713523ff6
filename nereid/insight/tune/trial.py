"""A server for the candidates of a search: a copy of the repository, with one model loaded at a time."""

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tritonclient.http import InferenceServerClient, InferInput
from tritonclient.utils import triton_to_np_dtype

from nereid.base.config.model_config import CONFIGS
from nereid.base.contract import IMAGE
from nereid.base.errors import OperationFailed, ServerError, WrongUsage
from nereid.insight.tune import load_generator, photos, profiles
from nereid.insight.tune.load_generator import HOST
from nereid.insight.tune.profiles import PLAIN_CONFIG, Tunable, value_of, with_settings
from nereid.insight.tune.search import CandidateSettings, LoadResults, NotMeasured
from nereid.server.command_line import TUNED_PROFILE, ServerOptions
from nereid.server.embedded_server import EmbeddedServer, infer_path
from nereid.server.model_control import ModelControl, NotReached
from nereid.server.ports import Ports, free_ports

LOAD_TIMEOUT_S, MIN_LOAD_TIMEOUT_S, POLL_S = 60.0, 1.0, 0.02
TO_IMAGES = {"Inference-Header-Content-Length": "0"}
# A tensor with at least this number of dims holds an image. An open side gets a size that networks with
# strides up to 64 accept; PP-OCR trains recognisers with lines of this width.
PICTURE_DIMS, OPEN_SIDE_PX = 3, 320


class TrialServer:
    """A server that measures one candidate after the other; a context manager.

    Args:
        repository: the model repository; a copy is served.
        images: encoded images that are sent in turn; none for the sample of the model's task.
        folder: an empty folder for the copy and the server's files.
        load_deadline: deadline for loading candidates (monotonic clock). The first candidate always has
            `LOAD_TIMEOUT_S`.
    """

    def __init__(
        self,
        repository: Path,
        tuned: Tunable,
        images: Sequence[bytes],
        concurrencies: Sequence[int],
        folder: Path,
        environment: Mapping[str, str],
        load_deadline: float = float("inf"),
    ) -> None:
        self._tuned = tuned
        self._images = list(images)
        self._concurrencies = concurrencies
        self._folder = folder
        self._load_deadline = load_deadline
        self._has_measured = False
        copy = copy_repository(repository, folder / "models")
        self._plain = copy / tuned.model / PLAIN_CONFIG
        self._config = copy / tuned.model / CONFIGS / f"{TUNED_PROFILE}.pbtxt"
        self._requests: list[Path] = []
        # The models to which it sends requests also have their configs from the profile.
        profiles.write(copy, profiles.tunable(copy, tuned.model, tuned.profile), {}, "", ())
        self._write(tuned.text)
        ports = Ports(*free_ports(3))
        options = ServerOptions(copy, TUNED_PROFILE, HOST, ports)
        (folder / "server").mkdir()
        self.server = EmbeddedServer(
            options, folder / "server", environment, only_models=[tuned.model, *tuned.steps]
        )

    def __enter__(self) -> "TrialServer":
        self.server.__enter__()
        try:
            config = self.served_config()
            images = self._images or [photos.sample([tensor.name for tensor in config.output])]
            bodies = request_bodies(config, images)
            path, port = infer_path(self._tuned.model), self.server.options.ports.http
            for number, (body, headers) in enumerate(bodies):
                request = self._folder / f"request-{number}"
                request.write_bytes(load_generator.post_request(HOST, port, path, body, headers))
                self._requests.append(request)
        except BaseException:
            self.server.stop()
            raise
        return self

    def __exit__(self, *raised: Any) -> None:
        self.server.__exit__(*raised)

    def served_config(self) -> Any:
        """Return the model's config as the server completed it."""
        return self._model_control().config(self._tuned.model)

    def measure(self, candidate: CandidateSettings, seconds: float) -> LoadResults:
        """Reload the model with a candidate's settings, and load it at each concurrency for `seconds`.

        Raises:
            NotMeasured: the server rejects or ignores the settings, ends, hangs, or fails requests.
        """
        try:
            self._revive()
            self._serve(candidate)
            config = self.served_config()
        except (OperationFailed, ServerError) as error:
            raise self._broken(" ".join(str(error).split())) from None
        for name, value in candidate:
            if (served_value := value_of(config, name)) != value:
                raise NotMeasured(f"{name}: expected {value}, the server has {served_value}")
        try:
            loads = load_generator.run(
                self.server.options.ports.http, self._requests, self._concurrencies, seconds
            )
        except subprocess.SubprocessError as error:
            raise self._broken(f"the load failed: {error}") from None
        for number, load in loads.items():
            if load.failed or not load.answered:
                raise self._broken(
                    f"at concurrency {number}, {load.answered} requests were answered, {load.failed} failed"
                )
        self._has_measured = True
        return loads

    def _broken(self, reason: str) -> NotMeasured:
        """Stop the server, so that the next candidate gets an undamaged one."""
        self.server.stop(is_done=lambda: True)
        return NotMeasured(reason)

    def _revive(self) -> None:
        if self.server.poll() is not None:
            self.server.stop()  # the stubs of a server that crashed may still run
            self._write(self._tuned.text)
            self.server.start()
            self.server.wait_ready(self._load_timeout_s())

    def _serve(self, candidate: CandidateSettings) -> None:
        model, model_control = self._tuned.model, self._model_control()
        model_control.unload(model)
        # A model that is still being unloaded would use the cores.
        deadline = time.monotonic() + LOAD_TIMEOUT_S
        while not model_control.is_gone(model):
            if time.monotonic() > deadline:
                raise NotReached(f"'{model}' was not unloaded within {LOAD_TIMEOUT_S:g} s")
            time.sleep(POLL_S)
        self._write(with_settings(self._tuned.text, dict(candidate)))
        model_control.load(model)

    def _model_control(self) -> ModelControl:
        return ModelControl(self.server.info(), load_s=self._load_timeout_s())

    def _load_timeout_s(self) -> float:
        load_deadline = self._load_deadline if self._has_measured else float("inf")
        return max(MIN_LOAD_TIMEOUT_S, min(LOAD_TIMEOUT_S, load_deadline - time.monotonic()))

    def _write(self, text: str) -> None:
        self._config.parent.mkdir(exist_ok=True)
        self._config.write_text(text)
        os.utime(self._plain) if self._plain.exists() else self._plain.touch()


def copy_repository(repository: Path, target: Path) -> Path:
    """Copy a repository: configs and routes as files, large files as links.

    Version folders are real folders, so files that a backend writes next to a network stay in the copy.
    """
    return Path(
        shutil.copytree(
            repository, target, copy_function=_copy_or_link, ignore=shutil.ignore_patterns(".*.nereid")
        )
    )


def _copy_or_link(source: str, target: str) -> None:
    if source.endswith((".pbtxt", ".json", ".jsonl", ".txt")):
        shutil.copy2(source, target)
        return
    file = Path(source).resolve()  # a relative link would point elsewhere from the copy
    with contextlib.suppress(OSError):  # another filesystem, or another user's file
        os.link(file, target)
        return
    Path(target).symlink_to(file)


def request_bodies(config: Any, images: Sequence[bytes]) -> list[tuple[bytes, dict[str, str]]]:
    """Return bodies and headers of requests for a model: images, and tensors of the shapes in its config.

    Raises:
        WrongUsage: the model takes neither images nor numbers.
    """
    inputs = [tensor for tensor in config.input if not tensor.optional]
    if len(inputs) == 1 and _is_image(inputs[0]):
        return [(image, TO_IMAGES) for image in images]
    sent = images if any(map(_is_image, inputs)) else [b""]
    return [_tensors_body(config, inputs, image) for image in sent]


def _is_image(tensor: Any) -> bool:
    return (tensor.name, _datatype(tensor)) == (IMAGE, "STRING")


def _tensors_body(config: Any, inputs: Sequence[Any], image: bytes) -> tuple[bytes, dict[str, str]]:
    tensors = []
    for tensor in inputs:
        array = _array(config, tensor, image)
        datatype = _datatype(tensor).replace("STRING", "BYTES")
        tensors.append(InferInput(tensor.name, list(array.shape), datatype))
        tensors[-1].set_data_from_numpy(array)
    body, header_bytes = InferenceServerClient.generate_request_body(tensors)
    return body, {"Inference-Header-Content-Length": str(header_bytes)}


def _datatype(tensor: Any) -> str:
    field = tensor.DESCRIPTOR.fields_by_name["data_type"]
    return str(field.enum_type.values_by_number[tensor.data_type].name.removeprefix("TYPE_"))


def _array(config: Any, tensor: Any, image: bytes) -> np.ndarray:
    is_picture = len(tensor.dims) >= PICTURE_DIMS
    sides = [dim if dim > 0 else OPEN_SIDE_PX if is_picture else 1 for dim in tensor.dims]
    shape = [1] * (config.max_batch_size > 0) + sides
    if _is_image(tensor):
        return np.full(shape, image, object)
    dtype = triton_to_np_dtype(_datatype(tensor)) if _datatype(tensor) != "STRING" else None
    if dtype is None:
        raise WrongUsage(
            f"'{config.name}' cannot be tuned: expected an input of images or numbers, "
            f"got '{tensor.name}' {_datatype(tensor)}"
        )
    draw = np.random.default_rng(0)
    if np.issubdtype(dtype, np.floating):
        return draw.standard_normal(shape).astype(dtype)
    return draw.integers(0, 2, shape).astype(dtype)
