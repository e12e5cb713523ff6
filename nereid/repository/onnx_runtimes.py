"""The ONNX Runtimes of the embedded server and of the container, and the networks that they open."""

from collections.abc import Iterable
from dataclasses import dataclass

from nereid.repository.onnx_file import InvalidOnnx, OnnxFile

# The newest operator set and IR version that each minor release of ONNX Runtime 1.x opens.
# Source: measured 2026-11-21 with the wheels of 1.24.4, 1.25.1, 1.26.0 to 1.30.0 and 1.31.1: a Relu of every
# opset and IR version was opened.
CAPABILITIES = {24: (25, 13), **dict.fromkeys(range(25, 32), (26, 13))}
# Source: triton-inference-server/server, pull 8918 (2026-08-05, for 26.08) sets 1.28, and pull 8966
# (2026-09-11, for 26.09) replaces 1.28.0. The image itself was not opened.
CONTAINER, CONTAINER_MINOR = "the container 26.08", 28
# Source: ONNX Runtime, docs/Versioning.md: opset 7 is the oldest that is supported.
MIN_OPSET = 7


@dataclass(frozen=True, slots=True)
class Runtime:
    """A server's ONNX Runtime, and the newest opset and IR version that it opens."""

    name: str
    opset: int
    ir_version: int


def supported_runtimes() -> tuple[Runtime, Runtime]:
    """Return the runtimes of the embedded server, which is the installed one, and of the container."""
    import onnxruntime

    installed = int(onnxruntime.__version__.split(".")[1])
    return (_runtime("the embedded server", installed), _runtime(CONTAINER, CONTAINER_MINOR))


def _runtime(name: str, minor: int) -> Runtime:
    # A release newer than the table opens at least the same networks as the last one in it.
    return Runtime(f"{name} (ONNX Runtime 1.{minor})", *CAPABILITIES[max(24, min(minor, max(CAPABILITIES)))])


def check_runtimes(file: OnnxFile, servers: Iterable[Runtime]) -> None:
    """Check that every server can open a network of this opset and IR version; else InvalidOnnx."""
    if file.opset < MIN_OPSET:
        found = f"opset {file.opset}" if file.opset else "no opset"
        raise InvalidOnnx(f"'{file.path.name}': expected opset {MIN_OPSET} or later, got {found}")
    problems = []
    for what, has, field_name in (
        ("opset", file.opset, "opset"),
        ("IR version", file.ir_version, "ir_version"),
    ):
        limits = [(each.name, getattr(each, field_name)) for each in servers]
        if short := [f"at most {limit} for {name}" for name, limit in limits if has > limit]:
            lowest = min(limit for _, limit in limits)
            problems.append(
                f"expected {what} {', '.join(short)}, got {has}; fix: export it with {what} {lowest}"
            )
    if problems:
        raise InvalidOnnx(f"'{file.path.name}': {'; '.join(problems)}")
