"""The same fault by REST, v2 over HTTP and v2 over gRPC has the same code, blame, retry and effects."""

import json
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
import pytest
from tritonclient.grpc import service_pb2 as v2

from nereid.base import contract
from nereid.base.assets import COFFEE
from nereid.base.prometheus_text import MetricSamples
from nereid.gateway import key_changes
from nereid.gateway.admission import MIN_LIMIT
from nereid.gateway.failures import STATUS_BY_CODE
from tests.classifiers import Script, error, serving
from tests.e2e.conftest import url
from tests.routes import WATCHDOG_S, wait_until
from tests.supervised import running_gateway
from tests.tables import cases

PHOTO = COFFEE.read_bytes()
HUGE = b"\x89PNG\r\n\x1a\n" + bytes(8) + (60_000).to_bytes(4) * 2 + bytes(9)
INFER = "/inference.GRPCInferenceService/ModelInfer"
# Statuses over gRPC, by those over HTTP.
GRPC = {400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND"}
GRPC |= {413: "INVALID_ARGUMENT", 429: "RESOURCE_EXHAUSTED", 500: "INTERNAL", 503: "UNAVAILABLE"}
GRPC[504] = "DEADLINE_EXCEEDED"

Edit = Callable[[dict[str, Any], list[bytes]], object]


@dataclass(frozen=True)
class Sent:
    """A request; only v2 has tensors to `edit`: the JSON, and a list with the data of the inputs."""

    image: bytes = PHOTO
    model: str = "classify"
    headers: tuple[tuple[str, str], ...] = ()
    key: str = "infer"
    edit: Edit | None = None

    def tensors(self) -> tuple[dict[str, Any], list[bytes]]:
        document: dict[str, Any] = {"parameters": {}, "outputs": [], "id": "1"}
        document["inputs"] = [{"name": "image", "shape": [1, 1], "datatype": "BYTES", "parameters": {}}]
        data = [len(self.image).to_bytes(4, "little") + self.image]
        if self.edit:
            self.edit(document, data)
        return document, data


class Front:
    """A gateway with the keys `infer`, `route` and `poor`, which has used up its quota."""

    def __init__(self, client: httpx.Client, channel: Any, keys: dict[str, str]) -> None:
        self._http, self._channel, self._keys = client, channel, keys
        for _ in range(11):
            self.rest(Sent(b"", key="poor"))

    def _headers(self, sent: Sent) -> list[tuple[str, str]]:
        return [*sent.headers, *([("x-api-key", self._keys.get(sent.key, sent.key))] if sent.key else [])]

    def rest(self, sent: Sent) -> tuple[object, bool]:
        return self._post(f"/v1/models/{sent.model}/predict", sent.image, self._headers(sent))

    def http(self, sent: Sent) -> tuple[object, bool]:
        document, data = sent.tensors()
        for tensor, content in zip(document["inputs"], data, strict=False):
            tensor["parameters"].setdefault("binary_data_size", len(content))
        head = json.dumps(document).encode()
        length = ("inference-header-content-length", str(len(head)))
        path = f"/v2/models/{sent.model}/infer"
        return self._post(path, b"".join([head, *data]), [*self._headers(sent), length])

    def _post(self, path: str, body: bytes, headers: list[tuple[str, str]]) -> tuple[object, bool]:
        answer = self._http.post(path, content=body, headers=headers)
        return answer.status_code, "retry-after" in answer.headers

    def grpc(self, sent: Sent) -> tuple[object, bool]:
        document, data = sent.tensors()
        message = v2.ModelInferRequest(model_name=sent.model, id=document["id"], raw_input_contents=data)
        _set(message, document)
        for key, kind in (("inputs", message.inputs), ("outputs", message.outputs)):
            for entry in document[key]:
                fields = {name: entry[name] for name in ("shape", "datatype") if name in entry}
                _set(kind.add(name=entry["name"], **fields), entry)
        call = self._channel.unary_unary(INFER)
        try:
            call(message.SerializeToString(), metadata=self._headers(sent), timeout=WATCHDOG_S)
        except grpc.RpcError as failed:
            return failed.code().name, "retry-after" in dict(failed.trailing_metadata() or ())
        return "OK", False

    def page(self) -> tuple[Counter[str], float]:
        text = self._http.get("/metrics", headers={"x-api-key": self._keys["infer"]}).text
        page, others = MetricSamples.parse(text), {"endpoint": "/metrics"}
        counts = page.sums("nereid_gateway_requests_total", "outcome", excluding=others)
        outcomes = Counter({outcome: int(count) for (outcome,), count in counts.items()})
        return outcomes, page.total("nereid_gateway_limit")


def _set(message: Any, document: dict[str, Any]) -> None:
    kinds = {int: "int64_param", str: "string_param"}
    for name, value in document.get("parameters", {}).items():
        setattr(message.parameters[name], kinds[type(value)], value)


def check(front: Front, sent: Sent, code: str) -> None:
    """Check that the request fails equally by every protocol that can carry it."""
    ways = ("http", "grpc") if sent.edit else ("rest", "http", "grpc")
    for way in ways[:2] if code == "too_large" else ways:  # gRPC ends such a call itself
        before, limit = front.page()

        status, has_retry = getattr(front, way)(sent)

        wait_until(lambda before=before: front.page()[0] != before, "the count")
        after, new_limit = front.page()
        assert (way, dict(after - before)) == (way, {code: 1})
        assert status == (GRPC[STATUS_BY_CODE[code]] if way == "grpc" else STATUS_BY_CODE[code])
        assert has_retry == (STATUS_BY_CODE[code] in (429, 503))
        assert (new_limit < limit) == (code == "overloaded" and limit > MIN_LIMIT)


@contextmanager
def fronted(folder, triton: str):
    file = folder / "keys.json"
    keys = {name: key_changes.add(file, name, [name], None) for name in ("infer", "route")}
    keys["poor"] = key_changes.add(file, "poor", ["infer"], 0.001)
    words = f"--url {triton} --grpc-port 0 --model classify --require-keys --keys {file}"
    with (
        running_gateway(folder / "log", *words.split()) as ports,
        httpx.Client(base_url=f"http://127.0.0.1:{ports['http']}", timeout=WATCHDOG_S) as client,
        grpc.insecure_channel(f"127.0.0.1:{ports['grpc']}") as channel,
    ):
        yield Front(client, channel, keys)


@pytest.fixture(scope="module")
def front(fused, tmp_path_factory):
    with fronted(tmp_path_factory.mktemp("front"), url(fused, "http")) as made:
        yield made


@pytest.fixture(scope="module")
def scripted(tmp_path_factory):
    """A gateway in front of a server with scripted responses."""
    script = Script(None)
    with serving(script) as triton, fronted(tmp_path_factory.mktemp("scripted"), triton) as made:
        yield made, script


def headers(*pairs: tuple[str, str], key: str = "infer") -> Sent:
    return Sent(headers=pairs, key=key)


def edited(edit: Edit) -> Sent:
    return Sent(edit=edit)


def tensor(**fields: Any) -> Sent:
    return edited(lambda document, data: document["inputs"][0].update(fields))


def added(field: str, name: str, value: Any) -> Sent:
    return edited(lambda document, data: document[field].update({name: value}))


def output(name: str, **parameters: Any) -> Sent:
    return edited(lambda document, data: document["outputs"].append({"name": name, "parameters": parameters}))


CALLERS = {
    "unauthenticated": {
        "no key": Sent(key=""),
        "wrong key": Sent(key="wrong"),
        "wrong bearer": headers(("authorization", "Bearer wrong"), key=""),
    },
    "forbidden": {"wrong scope": Sent(key="route")},
    "rate_limited": {"no quota": Sent(key="poor")},
    "not_found": {"unknown model": Sent(model="nobody"), "impossible model": Sent(model="a b")},
    "too_large": {"too large": Sent(bytes(34 * 2**20))},
    "invalid_image": {
        "empty image": Sent(b""),
        "text": Sent(b"no image"),
        "damaged image": Sent(PHOTO[:20_000]),
        "huge image": Sent(HUGE),
    },
    "invalid_request": {
        "two keys": headers(("x-api-key", "other")),
        "two variants": headers(("x-variant", "v1"), ("x-variant", "v2")),
        "two route keys": headers(("x-route-key", "me"), ("x-route-key", "me")),
        "many rules": headers(*[(f"x-route-{number}", "a") for number in range(33)]),
        "long route key": headers(("x-route-key", "a" * 129)),
        "unknown variant": headers(("x-variant", "v9")),
        "unknown version": headers(("x-model-version", "99")),
        "wrong name": tensor(name="picture"),
        "long name": tensor(name="a" * 1025),
        "null in a name": tensor(name="a\0"),
        "wrong datatype": tensor(datatype="UINT8"),
        "unknown datatype": tensor(datatype="FP8"),
        "wrong shape": tensor(shape=[2, 1]),
        "wrong rank": tensor(shape=[1]),
        "empty shape": tensor(shape=[0, 1]),
        "huge shape": tensor(shape=[2**40, 1]),
        "many dimensions": tensor(shape=[1] * 17),
        "shared memory": tensor(parameters={"shared_memory_region": "x"}),
        "no inputs": edited(lambda document, data: (document["inputs"].clear(), data.clear())),
        "missing data": edited(lambda document, data: data.clear()),
        "short data": edited(lambda document, data: data.insert(0, data.pop()[:-1])),
        "long data": edited(lambda document, data: data.insert(0, data.pop() + b"x")),
        "many outputs": edited(lambda document, data: document["outputs"].extend([{"name": "scores"}] * 65)),
        "long id": edited(lambda document, data: document.update(id="a" * 1025)),
        "unknown output": output("nothing"),
        "classes of nothing": output("nothing", classification=3),
        "classes of text": output("variant", classification=3),
        "negative classes": output("scores", classification=-1),
        "output in shared memory": output("scores", shared_memory_region="x"),
        "reserved parameter": added("parameters", "traceparent", "x"),
        "probe": added("parameters", "nereid-probe", "1"),
        "probe in other letters": added("parameters", "Nereid-Probe", "1"),
        "time of sending": added("parameters", "nereid_sent_ns", "1"),
        "negative timeout": added("parameters", "timeout", -1),
        "priority in words": added("parameters", "priority", "high"),
        "flag as number": added("parameters", "sequence_start", 1),
    },
}
SERVERS = {
    "overloaded": {
        "overloaded": error(f"in ensemble 'x', {contract.OVERLOADED_PREFIX}64", 503),
        "full queue": error(contract.QUEUE_FULL_TEXT, 503),
        "full memory": error(contract.SHARED_MEMORY_FULL_TEXT, 500),
        "too many requests": error("later", 429),
    },
    "deadline_exceeded": {
        "late": error(f"{contract.DEADLINE_EXCEEDED_PREFIX}1 s", 503),
        "late in the queue": error(contract.QUEUE_TIMEOUT_TEXT, 503),
    },
    "unavailable": {
        "not loaded": error(f"{contract.UNAVAILABLE_PREFIX}v1", 503),
        "not ready": error(contract.NOT_READY_TEXT, 400),
    },
    "inference_failed": {
        "not healthy": error(f"Stub process 'x' {contract.NOT_HEALTHY_TEXT}", 500),
        "failed": error(f"{contract.INFERENCE_FAILED_PREFIX}no memory", 500),
        "unknown": error("something else", 500),
    },
    "unreachable": {"broken connection": None, "no HTTP": b"SSH-2.0-x\r\n"},
    "invalid_image": {"bad image": error(f"{contract.INVALID_IMAGE_PREFIX}no", 400)},
}


def rows(table: dict[str, dict[str, Any]]) -> dict[str, tuple[Any, str]]:
    return {name: (value, code) for code, values in table.items() for name, value in values.items()}


@cases(("sent", "code"), **rows(CALLERS))
def test_fault_of_the_caller_is_equal(front, sent, code):
    check(front, sent, code)


@cases(("step", "code"), **rows(SERVERS))
def test_fault_of_the_server_is_equal(scripted, step, code):
    front, script = scripted
    script.steps = [step]

    check(front, Sent(), code)
