"""One key beside another in front of a simulated server: instances with a queue, in simulated time."""

import asyncio
import selectors
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import cycle
from typing import Any

from nereid.gateway.admission import Admission, UnitLatencies
from nereid.gateway.failures import Failure
from tests.tables import cases

INSTANCES = 2


class Simulated(selectors.SelectSelector):
    """A selector for a loop whose time passes only while it waits."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        self.now_s += timeout or 0.0
        return super().select(0)


class Server:
    def __init__(self, now_s: Callable[[], float]) -> None:
        self.admission = Admission(64, now_s)
        self.admission.unit_latencies = UnitLatencies(now_s, cores=INSTANCES)
        self._now_s, self._idle = now_s, asyncio.Semaphore(INSTANCES)

    async def _run(self, seconds: float) -> None:
        async with self._idle:
            await asyncio.sleep(seconds)

    async def ask(self, key: str, seconds: float, cost: int = 1, timeout_s: float = 10.0) -> float:
        """Send a request as `run_inference` does; return its time."""
        began_s = self._now_s()
        slot = await self.admission.acquire(timeout_s, key, [cost], "m")
        running = asyncio.create_task(self._run(seconds))  # the server goes on, whoever waits
        is_answered = False
        try:
            async with asyncio.timeout(began_s + timeout_s - self._now_s()):
                await asyncio.shield(running)
            is_answered = True
        except TimeoutError:
            asyncio.get_running_loop().call_later(slot.abandoned_work_s(), slot.release)
            raise
        finally:
            slot.measure(is_answered)
        slot.release_answered()
        return self._now_s() - began_s

    async def flood(self, requests: Iterator[dict[str, Any]]) -> None:
        for request in requests:
            with suppress(Failure, TimeoutError):
                await self.ask("hostile", **request)
            await asyncio.sleep(0.01)

    async def steady(self, seconds: float) -> list[float]:
        times = []
        for _ in range(100):
            times.append(await self.ask("steady", seconds))
            await asyncio.sleep(0.2)
        return sorted(times)


@cases(
    declared=(0.02, [{"seconds": 2.0, "cost": 64}]),
    undeclared=(0.02, [{"seconds": 2.0}]),
    slow_among_others=(0.3, [*[{"seconds": 0.15}] * 30, {"seconds": 5.0}]),
    slow_as_all=(0.3, [{"seconds": 0.4}]),
    slower=(0.3, [{"seconds": 3.0}]),
    declared_and_left_early=(0.02, [{"seconds": 2.0, "cost": 64, "timeout_s": 0.3}]),
    undeclared_and_left_early=(0.02, [{"seconds": 2.0, "timeout_s": 0.3}]),
)
def test_flood_of_one_key_leaves_the_server_to_another(usual_s, hostile):
    """Nothing of the other fails, and 99 of 100 requests take at most three times as long as alone."""
    selector = Simulated()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now_s  # type: ignore[method-assign]

    async def run() -> None:
        server = Server(loop.time)
        assert (await server.steady(usual_s))[-1] < 1.01 * usual_s
        flooding = [asyncio.create_task(server.flood(cycle(hostile))) for _ in range(32)]

        times = await server.steady(usual_s)

        assert len(flooding) == 32
        assert times[-2] <= 3 * usual_s, times[-10:]

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(run())
