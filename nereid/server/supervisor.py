"""Looks after a running server: finds stubs that died or hang, and has Triton start new ones.

Three threads: one looks at the processes, one has every model classify an image, one repairs. A repair makes
the files of the version newer and loads the model: Triton then starts new stubs beside the old ones, and
moves the requests over.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from nereid.back_off import BackOff
from nereid.server import stubs
from nereid.server.control import Control, NotReached, Refused
from nereid.server.embedded import EmbeddedServer, image_models
from nereid.server.health import Health
from nereid.server.run_dir import ServerRecord
from nereid.server.stubs import Process, Roster, Stub, Verdicts

LOOK_S, SECOND_LOOK_S, FIND_S = 0.1, 0.11, 0.8
PROBE_S, PROBE_TIMEOUT_S = 1.0, 5.0
# One verdict more settles a case; an instance among others is met only every so many probes.
MOST_REPEATS, MOST_COPIES = 4, 4
PROBERS = 16
REPAIR_DELAYS_S, CALM_S = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0), 30.0
# Requests that a dead stub has failed keep the old instances of its model for ever (Triton 24.10): what
# still runs of them is ended after so long, and the server is restarted before their threads fill it,
# about 150 for each instance.
OLD_STUBS_S, MOST_LEFT_OVER = 30.0, 16
# Triton looks every 15 s for what has changed, if it is told to poll.
POLLED_S = 40.0
PID, PROBE = "pid", "probe"


@dataclass(slots=True)
class _Model:
    """What was done to one model so far."""

    back_off: BackOff = field(default_factory=lambda: BackOff(REPAIR_DELAYS_S, CALM_S))
    repaired_s: float = float("-inf")
    not_before_s: float = float("-inf")


class Supervisor:
    """Watches one server for as long as the context lasts.

    Args:
        server: a ready one.
        record: of it.
        health: is told all that is found and done.
        log: takes one line for each thing done.
    """

    def __init__(
        self, server: EmbeddedServer, record: ServerRecord, health: Health, log: Callable[[str], None]
    ) -> None:
        self._server, self._health, self._log = server, health, log
        self._control = Control(record)
        self._options = server.options
        self._roster, self._lock = Roster(), threading.Lock()
        self._verdicts = Verdicts()
        self._models: dict[str, _Model] = {}
        self._dead: list[Stub] = []
        self._judged: list[str] = []
        self._left_over: dict[Process, float] = {}
        self._zombies: set[Process] = set()
        self._stopped: set[str] = set()
        self._suspects = threading.Event()
        self._probers = ThreadPoolExecutor(PROBERS, "probe")
        self._pending: dict[str, list[Future[None]]] = {}
        self._in_repair = ""
        self._last_trouble = ""
        self._over, self._work, self._wanted_end = threading.Event(), threading.Event(), threading.Event()
        self._found_s = float("-inf")
        self.ready: dict[str, set[int]] | None = None
        self._takes_images: list[str] = []
        self.restart_reason = ""
        self._threads = [
            threading.Thread(target=self._keep, args=[each], name=each.__name__, daemon=True)
            for each in (self._look_on, self._probe_on, self._repair_on)
        ]

    def __enter__(self) -> "Supervisor":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._over.set()
        self._work.set()
        self._suspects.set()
        self._probers.shutdown(wait=False, cancel_futures=True)
        deadline = time.monotonic() + 1
        for thread in self._threads:
            thread.join(timeout=max(0.0, deadline - time.monotonic()))

    def wait(self, timeout_s: float) -> bool:
        """Tell within that time whether the server has ended, or must be restarted: see `restart_reason`."""
        return self._wanted_end.wait(timeout_s)

    def is_emptied(self) -> bool:
        """Tell whether a stopping server has ended all its models, but for instances it will never end."""
        return bool(self._left_over) and all(stub.process in self._left_over for stub in self._living())

    def _living(self) -> list[Stub]:
        return stubs.find(self._server.pid, self._options.repository)

    def _keep(self, step: Callable[[], float]) -> None:
        while not self._over.is_set():
            try:
                pause_s = step()
            except NotReached:
                pause_s = PROBE_S  # the server is about to end, or hangs: the probes tell
            except Exception as error:
                # A supervisor that dies of the unforeseen is worse than one that says so.
                trouble = f"failed and goes on: {type(error).__name__}: {error}"
                if trouble != self._last_trouble:
                    self._say(trouble)
                self._last_trouble, pause_s = trouble, PROBE_S
            self._over.wait(pause_s)

    def _look_on(self) -> float:
        if self._server.poll() is not None:
            self._wanted_end.set()
            return LOOK_S
        now = time.monotonic()
        is_new = self._look(find=now - self._found_s >= FIND_S)
        self._end_left_over(now)
        return SECOND_LOOK_S if is_new else LOOK_S

    def _look(self, find: bool) -> bool:
        """Look at the processes; returns whether a second look is wanted."""
        living = self._living() if find else []
        with self._lock:
            now = time.monotonic()
            if find:
                self._found_s = now
            states = stubs.states([*self._roster.processes, *(stub.process for stub in living)])
            found = self._roster.look(living, states, now)
            dead = [stub for stub in found if self._is_served(stub)]
            if not dead or find:  # another may have come in its place meanwhile
                self._dead = dead
            zombies = {process for process, state in states.items() if state == stubs.ZOMBIE}
            is_new, self._zombies = not zombies <= self._zombies, zombies
            stopped = {process for process, state in states.items() if state == stubs.STOPPED}
            self._stopped = self._roster.instances(stopped - self._left_over.keys())
            broken = {stub.model: f"the process of '{stub.instance}' is dead" for stub in dead}
            if self._in_repair:  # a new stub is there for a second before it can answer
                broken[self._in_repair] = "is being loaded again"
        if dead and not find:
            return self._look(find=True)
        self._health.looked(broken)
        if dead:
            self._work.set()
        if any(_model_of(instance) in self._takes_images for instance in self._stopped):
            self._suspects.set()
        return is_new

    def _is_served(self, stub: Stub) -> bool:
        return self.ready is None or stub.version in self.ready.get(stub.model, ())

    def _probe_on(self) -> float:
        began_s = time.monotonic()
        self._suspects.clear()
        ready = self._control.ready_versions()
        if ready != self.ready:  # what a model takes changes with its versions at most, and reading is slow
            self._takes_images, self.ready = image_models(self._options), ready
        models = [name for name in self._takes_images if name in ready]
        server_failure = None if models else self._server.probe_server(PROBE_TIMEOUT_S)
        if self._over.is_set():
            return 0.0
        self._health.asked(server_failure, models)
        for model in models:
            pending = [each for each in self._pending.get(model, ()) if not each.done()]
            # Triton gives requests that come together to different instances.
            count = self._instances(model) if self._suspected(model) else 1
            new = [self._probers.submit(self._probe_again, model) for _ in range(count - len(pending))]
            self._pending[model] = pending + new
        self._suspects.wait(max(0.0, PROBE_S - (time.monotonic() - began_s)))
        return SECOND_LOOK_S if self._suspects.is_set() else 0.0

    def _probe_again(self, model: str) -> None:
        for _ in range(MOST_REPEATS):
            if self._over.is_set() or not self._probe(model):
                return

    def _probe(self, model: str) -> bool:
        """Have a model classify an image; returns whether once more would tell more."""
        began_s = time.monotonic()
        failure = self._server.probe(model, PROBE_TIMEOUT_S)
        if self._over.is_set():
            return False
        self._health.probed(model, failure, began_s)
        instance = stubs.unhealthy_instance(failure or "")
        if not instance:
            return False
        with self._lock:
            blamed = _model_of(instance)
            is_known = self._in_repair == blamed or any(instance == each.instance for each in self._dead)
            if is_known or began_s < self._models.setdefault(blamed, _Model()).repaired_s:
                return False
            is_dead = self._verdicts.add(instance, time.monotonic()) or instance in self._stopped
            if is_dead and instance not in self._judged:
                self._judged.append(instance)
        if is_dead:
            self._work.set()
        return not is_dead

    def _suspected(self, model: str) -> list[str]:
        with self._lock:
            return [instance for instance in self._stopped if _model_of(instance) == model]

    def _instances(self, model: str) -> int:
        with self._lock:
            stubs_of = self._roster.of(model, (self.ready or {}).get(model, ()))
            return min(MOST_COPIES, len({stub.instance for stub in stubs_of}))

    def _repair_on(self) -> float:
        self._work.wait()
        self._work.clear()
        while not self._over.is_set():
            with self._lock:
                dead, judged = list(self._dead), list(self._judged)
            if not dead and not judged:
                return 0.0
            ready = self._control.ready_versions()
            is_idle = True
            for model in {stub.model for stub in dead}:
                versions = {stub.version for stub in dead if stub.model == model} & ready.get(model, set())
                is_idle &= not self._repair(model, versions, PID)
            for instance in judged:
                is_idle &= instance not in self._judged or not self._repair_judged(instance, ready)
            if is_idle:
                self._over.wait(LOOK_S)
        return 0.0

    def _repair_judged(self, instance: str, ready: dict[str, set[int]]) -> bool:
        with self._lock:
            found = self._roster.in_use(instance)
        model = found[0].model if found else _model_of(instance)
        versions = {stub.version for stub in found} & ready.get(model, set())
        if time.monotonic() < self._of(model).not_before_s:
            return False
        with self._lock:
            self._judged.remove(instance)
            self._verdicts.clear(instance)
        if len(found) == 1:  # which of several hangs is not known
            _kill(found[0].process)
        return self._repair(model, versions or ready.get(model, set()), PROBE)

    def _repair(self, model: str, versions: Collection[int], cause: str) -> bool:
        """Have Triton start new stubs for versions of a model; returns whether it was tried."""
        about, now = self._of(model), time.monotonic()
        if not versions or now < about.not_before_s:
            return False
        with self._lock:
            old = [stub.process for stub in self._roster.of(model, versions)]
        if self._options.model_control_mode == "none":
            with self._lock:  # or the server would wait for these when it is asked to end
                self._left_over |= dict.fromkeys(old, now + OLD_STUBS_S)
            self._want_restart(f"a stub of '{model}' is dead, and models cannot be loaded in this mode")
            return True
        with self._lock:
            self._in_repair = model
        try:
            self._try_repair(model, versions, cause)
        finally:
            with self._lock:
                self._in_repair = ""
                about.repaired_s = time.monotonic()
                self._pending.pop(model, None)  # probes of old instances may take their whole time
                self._left_over |= dict.fromkeys(old, about.repaired_s + OLD_STUBS_S)
                for instance in [each for each in self._judged if _model_of(each) == model]:
                    self._judged.remove(instance)
                    self._verdicts.clear(instance)
        return True

    def _try_repair(self, model: str, versions: Collection[int], cause: str) -> None:
        about, began_s = self._of(model), time.monotonic()
        named = f"model '{model}' version {', '.join(map(str, sorted(versions)))}"
        pause_s = about.back_off.next_s(began_s - about.repaired_s)
        try:
            self._reload(model, versions)
        except Refused as error:
            self._health.repair_failed(model)
            self._say(f"{named} has a dead stub, and cannot be loaded: {error}; again in {pause_s:g} s")
        else:
            self._look(find=True)
            seconds = time.monotonic() - began_s
            self._health.repaired(model, cause)
            self._say(f"{named} had a dead stub (found by {cause}): loaded again in {seconds:.1f} s")
        if self._options.model_control_mode == "poll":
            pause_s = max(pause_s, POLLED_S)
        about.not_before_s = time.monotonic() + pause_s

    def _reload(self, model: str, versions: Collection[int]) -> None:
        folder = self._options.repository / model
        touched = [stubs.touch(folder / str(version)) for version in versions]
        if self._options.model_control_mode == "poll":
            return
        if not all(touched):  # somebody else's files: what is loaded already must go first
            self._control.unload(model)
        self._control.load(model)

    def _end_left_over(self, now_s: float) -> None:
        with self._lock:
            states = stubs.states(list(self._left_over))
            self._left_over = {each: due for each, due in self._left_over.items() if each in states}
            late = [each for each, due in self._left_over.items() if due < now_s and states[each] != "Z"]
            count = sum(state == stubs.ZOMBIE for state in states.values())
        for each in late:
            _kill(each)
        if count >= MOST_LEFT_OVER:
            self._want_restart(f"{count} dead instances hold its threads and memory")

    def _want_restart(self, reason: str) -> None:
        if not self._wanted_end.is_set():
            self.restart_reason = reason
            self._wanted_end.set()

    def _of(self, model: str) -> _Model:
        with self._lock:
            return self._models.setdefault(model, _Model())

    def _say(self, text: str) -> None:
        if not self._over.is_set():
            self._log(f"supervisor: {text}")


def _model_of(instance: str) -> str:
    """Return the model of an instance by Triton's own way to name one: MODEL_GROUP_NUMBER."""
    return instance.rsplit("_", 2)[0]


def _kill(process: Process) -> None:
    if stubs.states([process]):
        os.kill(process.pid, signal.SIGKILL)
