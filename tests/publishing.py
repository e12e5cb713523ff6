"""Publishing for tests: a repository whose versions add their own numbers."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper

from nereid.models.publish.add import AddProposal, AddRequest, add
from nereid.models.publish.examination import ExaminationLimits
from nereid.models.publish.publisher import Published, publish
from nereid.server.embedded_server import EmbeddedServer
from nereid.server.run_dir import ServerInfo
from tests import routes
from tests.networks import Dims, assert_same, constant, infer, network, value
from tests.routes import ALL_VERSIONS, NETWORK, document, store_adding, store_ensemble, store_router, variant

NET, ROUTE = "net", "r"
# Of the network that `classifier` builds.
CLASSES, SIDE = 5, 32
ONLY_FIRST = "version_policy { specific { versions: [ 1 ] } }  # grows\n"
# Each version adds its own number, so its outputs differ from those of all others.
OTHER_ANSWERS = ExaminationLimits(is_change_accepted=True, max_slowdown=100)


def classifier(
    datatype: str = "FP32", shape: Dims = ("N", 3, SIDE, SIDE), outputs: Sequence[str] = ("logits",)
) -> onnx.ModelProto:
    """Build a network that averages the pixels of each channel and draws class scores from them."""
    axes = [1, 2] if shape[-1] == 3 else [2, 3]
    nodes = [
        helper.make_node("Cast", ["images"], ["floats"], to=onnx.TensorProto.FLOAT),
        helper.make_node("ReduceMean", ["floats"], ["means"], axes=axes, keepdims=0),
    ]
    nodes += [helper.make_node("MatMul", ["means", "weights"], [name]) for name in outputs]
    weights = np.linspace(-1, 1, 3 * CLASSES, dtype=np.float32).reshape(3, CLASSES)
    return network(
        nodes,
        [value("images", datatype, shape)],
        [value(name, "FP32", [shape[0], CLASSES]) for name in outputs],
        [constant("weights", weights)],
    )


def store_published(repository: Path, policy: str = ALL_VERSIONS) -> None:
    """Store network `net`, its pinned ensemble `net_v1`, and route `r`, which sends all to variant `v1`."""
    store_adding(repository, NET, 1, config=NETWORK + policy)
    (repository / NET / "configs").mkdir()
    (repository / NET / "configs" / "other.pbtxt").write_text(NETWORK + policy)
    store_ensemble(repository, f"{NET}_v1", NET, 1)
    store_router(repository, ROUTE, document(variant("v1", f"{NET}_v1", 100)))


def write_route(repository: Path, *variants: Mapping[str, Any]) -> None:
    routes.replace(repository / f"{ROUTE}.route.json", json.dumps(document(*variants)).encode())


def candidate(folder: Path, number: float) -> Path:
    path = folder / f"adds-{number:g}.onnx"
    onnx.save(routes.adding(number), path)
    return path


def publish_number(
    repository: Path, folder: Path, server_info: ServerInfo | None, number: float, **options: Any
) -> Published:
    return publish(repository, NET, candidate(folder, number), server_info, OTHER_ANSWERS, **options)


def added(server: EmbeddedServer, name: str, version: str = "") -> int:
    """Return the number that a model of `store_adding` adds."""
    response = infer(server, name, {"x": routes.X}, model_version=version)
    number = response["scores"][0, 0] - routes.X[0, 0]
    assert_same(response, {"scores": routes.X + number})
    return int(number)


def propose(repository: Path, request: AddRequest) -> AddProposal:
    """Add a network, and return what it was proposed to be."""
    proposals: list[AddProposal] = []

    def confirm(proposal: AddProposal) -> bool:
        proposals.append(proposal)
        return True

    add(repository, request, None, confirm=confirm)
    return proposals[0]


@contextmanager
def unchanged(folder: Path) -> Iterator[None]:
    """Require that a folder has the same files after the block as before it."""
    before = contents(folder)
    yield
    assert contents(folder) == before


def edit_route(repository: Path, name: str = ROUTE, **changes: Any) -> None:
    """Write a route's file with other fields."""
    path = repository / f"{name}.route.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def contents(repository: Path) -> dict[str, str]:
    """Return the SHA-256 of every file below a folder, by its path; folders count, too."""

    def digest(path: Path) -> str:
        return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""

    return {str(path.relative_to(repository)): digest(path) for path in sorted(repository.rglob("*"))}
