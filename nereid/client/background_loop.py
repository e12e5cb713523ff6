"""The event loop of the blocking HTTP clients: one per process, in a thread of its own."""

import asyncio
import os
import socket
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

Value = TypeVar("Value")
# By process, because a forked process does not inherit its parent's threads.
_LOOPS: dict[int, "BackgroundLoop"] = {}


class BackgroundLoop(asyncio.SelectorEventLoop):
    """Runs coroutines for other threads, which may run event loops of their own."""

    def run(self, coroutine: Coroutine[Any, Any, Value], tasks: set[asyncio.Task[Any]]) -> Value:
        """Return the result of a coroutine; cancel it if the calling thread is interrupted.

        `asyncio.run_coroutine_threadsafe` would leave a cycle that keeps the result, or the request that
        failed, until the collector runs.

        Args:
            tasks: includes the coroutine's task while it runs; changed only in the loop.

        Raises:
            CancelledError: the task was cancelled.
        """
        ended: SimpleQueue[asyncio.Task[Value]] = SimpleQueue()
        task: asyncio.Task[Value] | None = None

        def start() -> None:
            nonlocal task
            tasks.add(task := self.create_task(coroutine))
            task.add_done_callback(tasks.discard)
            task.add_done_callback(ended.put)

        self.call_soon_threadsafe(start)
        try:
            ended.get()
        except BaseException:
            self.call_soon_threadsafe(lambda: task and task.cancel())
            raise
        assert task
        return task.result()

    async def getaddrinfo(
        self, host: Any, port: Any, *, family: int = 0, type: int = 0, proto: int = 0, flags: int = 0
    ) -> Any:
        """Return the result of `socket.getaddrinfo`, run in a daemon thread.

        A thread of asyncio's executor delays the exit of the process, and cannot start during it.
        """
        addresses: Future[Any] = Future()
        addresses.set_running_or_notify_cancel()  # so that a lookup may end after its caller has given up

        def look_up() -> None:
            try:
                addresses.set_result(socket.getaddrinfo(host, port, family, type, proto, flags))
            except Exception as error:
                addresses.set_exception(error)

        threading.Thread(target=look_up, daemon=True).start()
        return await asyncio.wrap_future(addresses, loop=self)


def background_loop() -> BackgroundLoop:
    """Return the running loop of this process."""
    if (process := os.getpid()) not in _LOOPS:
        loop = BackgroundLoop()
        if _LOOPS.setdefault(process, loop) is loop:  # unless another thread was faster
            threading.Thread(target=loop.run_forever, daemon=True).start()
        else:
            loop.close()
    return _LOOPS[process]
