"""A router with functions as variants, and a clock that the test moves."""

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any

import numpy as np
from msgspec.structs import replace

from nereid.backends.routing.assignment import LoadedRoute, Route, Salts, Shadow, Variant
from nereid.backends.routing.router import Router
from nereid.backends.triton.metrics import ROUTE_METRICS
from nereid.base import errors
from nereid.tasks.classify.outputs import ClassificationOutputs

CAT, DOG = np.array([[0.9, 0.1]], np.float32), np.array([[0.2, 0.8]], np.float32)
V1 = Variant("v1", "m1", 1, 1)
V2 = Variant("v2", "m2", 1, 1, deadline_ms=1000)
ROUTE = Route((V1, V2), "v1", Salts("a", "b"))
WITH_SHADOW = replace(ROUTE, shadows=(Shadow("dark", "m3", 1, 100),))
TO_V1, TO_V2 = {"x-variant": "v1"}, {"x-variant": "v2"}
# Keys that are assigned to one variant each, so that tests need no chance.
KEY_V1, KEY_V2 = {"x-route-key": "a"}, {"x-route-key": "b"}


class World:
    def __init__(self, route: Route = ROUTE, **changes: Any) -> None:
        self.now = 1000.0
        self.log: list[str] = []
        self.counts: dict[tuple[str, tuple[tuple[str, str], ...]], float] = defaultdict(float)
        self.models: dict[str, Callable[[], np.ndarray]] = dict.fromkeys(("m1", "m2", "m3"), lambda: CAT)
        self.called: list[str] = []
        # Dead instances whose model has another process, of this age.
        self.replaced: set[str] = set()
        self.age_s = inf
        self.wakes = 0
        self.router = Router(
            in_use(replace(route, **changes)),
            ClassificationOutputs(),
            self,
            self.log.append,
            lambda: self.now,
            lambda: 0.0,
            lambda instance, age_s: instance in self.replaced and self.age_s >= age_s,
            self.wake,
        )

    def wake(self) -> None:
        self.wakes += 1

    def add(self, name: str, value: float = 1.0, /, **labels: str) -> None:
        """Count like the metrics page; an unknown name or label fails the test."""
        kind = ROUTE_METRICS[name].kind
        assert kind != "GAUGE"
        assert {*labels} == {*ROUTE_METRICS[name].labels}
        self.counts[name, tuple(sorted(labels.items()))] += value if kind == "COUNTER" else 1

    def set(self, name: str, value: float, /, **labels: str) -> None:
        assert ROUTE_METRICS[name].kind == "GAUGE"
        assert {*labels} == {*ROUTE_METRICS[name].labels}
        self.counts[name, tuple(sorted(labels.items()))] = value

    def count(self, name: str, **labels: str) -> float:
        """Return a count, summed over all other labels."""
        chosen = set(labels.items())
        return sum(n for (family, pairs), n in self.counts.items() if family == name and chosen <= set(pairs))

    def fail(self, model: str, error: Exception, after_s: float = 0.0) -> None:
        def answer() -> np.ndarray:
            self.now += after_s
            raise type(error)(*error.args)  # an error raised twice would keep its first context

        self.models[model] = answer

    def fail_once_each(self, model: str, *failures: Exception) -> None:
        left = iter(failures)

        def answer() -> np.ndarray:
            for error in left:
                raise error
            return CAT

        self.models[model] = answer

    def send(self, parameters: Mapping[str, str] = {}, **options: Any) -> "Request":
        request = Request(self, parameters, **options)
        if admitted := self.router.admit(request):
            self.router.handle(admitted)
        return request

    def break_variant(self, name: str = "v2") -> None:
        self.fail(f"m{name[1:]}", errors.InferenceFailed("no"))
        for _ in range(5):
            self.send({"x-variant": name})
        assert self.count("breaker_state", variant=name) == 2

    def hang_v2(
        self, parameters: Mapping[str, str] = TO_V2, **options: Any
    ) -> "tuple[Request, Callable[..., None]]":
        """Send a request to v2, which responds once the returned function is called, and is then awaited."""
        release, reached = threading.Event(), threading.Event()

        def wait() -> np.ndarray:
            reached.set()
            assert release.wait(60)
            return CAT

        def finish(timeout_s: float | None = None) -> None:
            release.set()
            thread.join(timeout_s)

        self.models["m2"] = wait
        request = Request(self, parameters, **options)
        thread = threading.Thread(target=self.router.handle, args=(self.router.admit(request),))
        thread.start()
        assert reached.wait(60)
        return request, finish


class Request:
    def __init__(
        self,
        world: World,
        parameters: Mapping[str, str],
        timeout_s: float = 0.0,
        is_gone: bool = False,
        is_large: bool = False,
    ) -> None:
        self.timeout_s = timeout_s
        self.timeouts: list[float] = []
        self.answers: list[tuple[str, ...]] = []
        self.errors: list[errors.ServingError] = []
        self.is_gone = is_gone
        self._world, self._parameters, self.is_large = world, parameters, lambda: is_large

    def check(self) -> None: ...

    def parameters(self) -> Mapping[str, str]:
        return self._parameters

    def is_cancelled(self) -> bool:
        return self.is_gone

    def forward(self, model: str, version: int, timeout_s: float, parameters: object = None) -> np.ndarray:
        self._world.called.append(model)
        self.timeouts.append(timeout_s)
        return self._world.models[model]()

    def arrays(self, response: np.ndarray, names: Sequence[str]) -> dict[str, np.ndarray]:
        (name,) = names
        return {name: response}

    def respond(self, response: np.ndarray, variant: str, version: str, reason: str) -> None:
        self.answers.append((variant, version, reason))

    def answer(self, rows: Mapping[str, np.ndarray]) -> None:
        self.answers.append(("answer", *map(str, rows), ""))

    def reject(self, error: errors.ServingError) -> None:
        self.errors.append(error)

    @property
    def outcome(self) -> tuple[str, ...] | str:
        assert len(self.answers) + len(self.errors) == 1, (self.answers, self.errors)
        return self.answers[0] if self.answers else str(self.errors[0])


def in_use(route: Route) -> LoadedRoute:
    return LoadedRoute(route, "", {variant.name: f"1{variant.name[1:]}" for variant in route.variants})


def dead(instance: str = "m2_0_0") -> errors.StubDied:
    return errors.StubDied(f"Stub process '{instance}' is not healthy.")
