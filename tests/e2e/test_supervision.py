"""Supervision by `nereid serve`: killed or stopped stubs and servers are replaced."""

import ctypes
import json
import os
import shutil
import signal
import stat
import time
from collections import Counter
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from nereid.backends.triton import stub_processes
from nereid.base.assets import COFFEE, REPOSITORY
from nereid.client.client_errors import Overloaded
from nereid.gateway import key_changes
from nereid.server import run_dir
from nereid.server.model_control import ModelControl, Refused
from nereid.tasks.classify.client import Classifier
from tests.deployment import check_health
from tests.e2e.conftest import group_members
from tests.faulty_networks import FRAGILE_IO, ILLEGAL_ACCESS, fragile
from tests.networks import ONE_INSTANCE, client_input, store
from tests.proof import REQUESTS
from tests.routes import WATCHDOG_S, adding, document, store_router, variant, wait_until
from tests.supervised import IMAGE_TO_SCORES, INSTANCES, Served, calling, image_input, serving, store_eyes

# Of each kind of process: 2 in CI, 20 in `make proof`.
KILLS = max(2, REQUESTS // 1000)
CALLERS = 12
# Numbers of the default variant of a route, of its fallback, and of the configured answer.
DEFAULT, SPARE, ANSWER = 51.0, 21.0, -1.0
TWO_INSTANCES = "instance_group { kind: KIND_CPU count: 2 }\n"


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A server of models with images, routes to them, and models with an incomplete config or a weakness."""
    base = tmp_path_factory.mktemp("supervision")
    repository = base / "repository"
    store_eyes(repository, "eyes", 10)
    store_eyes(repository, "first", 50, sleep_s=0.01, instances=1)
    store_eyes(repository, "spare", 20, sleep_s=0.01)
    store_eyes(repository, "slow", 30, sleep_s=0.01)
    store_eyes(repository, "single", 40, instances=1)
    store(repository, "bare", adding(1), config=None)
    store(repository, "fragile", fragile(), FRAGILE_IO + TWO_INSTANCES)
    full = document(variant("eyes", "eyes", 1), max_in_flight=1)
    store_router(repository, "full", full, config=ONE_INSTANCE + IMAGE_TO_SCORES)
    store_router(repository, "look", document(variant("both", "slow", 1)), config=IMAGE_TO_SCORES)
    # Its breaker closes only when the supervisor has replaced the process.
    alone = document(variant("only", "single", 1), breaker={"open_s": 600})
    store_router(repository, "alone", alone, config=IMAGE_TO_SCORES)
    # A process that hangs is killed after about ten seconds, and deadlines count from the arrival.
    variants = variant("first", "first", 1, deadline_ms=30_000), variant("spare", "spare", deadline_ms=30_000)
    spared = document(*variants, fallbacks=["spare"], answer={"scores": ANSWER})
    store_router(repository, "spared", spared, config=IMAGE_TO_SCORES)
    with serving(repository, base / "run") as running:
        wait_until(running.is_ready, "ready")
        wait_until(lambda: running.metric("probes_total", model="spared") > 1, "probes")
        yield running


def newest(served: Served, model: str) -> stub_processes.Stub:
    """Return the stub of a model that started last: those of before a repair may live on for a while."""
    return max(served.stubs(model), key=lambda stub: stub.process.start_ticks)


def test_killed_stub_is_replaced(served):
    killed = newest(served, "eyes").process
    before = served.metric("repairs_total", model="eyes", cause="pid")
    os.kill(killed.pid, signal.SIGKILL)

    assert json.loads(served.why_not_ready())["models"].keys() == {"eyes"}
    wait_until(lambda: served.metric("repairs_total", model="eyes", cause="pid") > before, "repair")
    wait_until(served.is_ready, "ready again")

    assert served.numbers("eyes") == [11.0] * 2 * INSTANCES
    assert served.metric("repairs_total", model="eyes", cause="pid") == before + 1
    assert killed not in [stub.process for stub in served.stubs("eyes")]
    assert served.log.count("supervisor: model 'eyes' version 1 had a dead stub (found by pid)") == before + 1


@pytest.mark.slow
def test_memory_of_requests_is_private_and_removed(tmp_path):
    """Also that of replaced stubs; after a kill of the whole server the next one removes it, and drains."""
    store_eyes(tmp_path / "repository", "eyes", 10)

    def modes() -> set[int]:
        words = Path(f"/proc/{served.server_info.pid}/cmdline").read_text()
        prefix = words.partition("shm-region-prefix-name=")[2].partition("\0")[0]
        regions.update(Path("/dev/shm").glob(f"{prefix}*"))
        return {stat.S_IMODE(region.stat().st_mode) for region in regions if region.exists()}

    regions: set[Path] = set()
    with serving(tmp_path / "repository", tmp_path / "run") as served:
        assert modes() == {0o600}
        os.kill(served.stubs("eyes")[0].process.pid, signal.SIGKILL)
        wait_until(lambda: served.metric("repairs_total", model="eyes") == 1, "repair")
        served.numbers("eyes")
        wait_until(lambda: modes() == {0o600}, "private regions")
        leader = served.server_info.pid
        served.process.kill()
        served.process.wait(WATCHDOG_S)
        assert any(region.exists() for region in regions)
        wait_until(lambda: group_members(leader) == [], "the server's end")

    with serving(tmp_path / "repository", tmp_path / "again", "--drain-s", "600") as served:
        assert not any(region.exists() for region in regions)
        check_drain(served)


def check_drain(served: Served) -> None:
    """After SIGTERM the server responds for the drain time, but is not ready; a second signal ends it now.

    The signals go to another thread than the main thread, whose wait they do not interrupt.
    """
    wait_until(served.is_ready, "ready")
    leader = served.server_info.pid

    signal_other_thread(served.process.pid, signal.SIGTERM)
    reason = served.why_not_ready()
    numbers = served.numbers("eyes")
    signal_other_thread(served.process.pid, signal.SIGTERM)

    assert (json.loads(reason), numbers) == ({"ready": False, "server": "stopping"}, [11.0] * 4)
    assert (served.process.wait(WATCHDOG_S), group_members(leader)) == (0, [])


@pytest.mark.slow
def test_full_route_is_ready(served):
    """Overload is not a failure: a full route stays ready, although it rejects probes, too."""
    held = served.repository / "held"
    held.touch()
    with (
        calling(served, "full", 1, inputs=lambda protocol: image_input(protocol, b"hold")) as calls,
        Classifier(f"127.0.0.1:{served.ports['grpc']}", "grpc", "full") as classifier,
    ):
        try:
            wait_until(lambda: overloaded(classifier), "a route that is full")
            probed = served.metric("probes_total", model="full")
            failed = served.metric("probe_failures_total", model="full")
            wait_until(lambda: served.metric("probes_total", model="full") > probed, "a probe")

            assert overloaded(classifier)
            assert served.metric("probe_failures_total", model="full") == failed
            assert served.is_ready()
            words = ["--url", f"http://127.0.0.1:{served.ports['http']}", "--model", "full"]
            assert check_health(*words) == (0, "")
        finally:
            held.unlink()
        wait_until(lambda: 11.0 in calls.since(), "the answer")


def overloaded(classifier: Classifier) -> bool:
    try:
        classifier.classify(COFFEE, top_k=1)
    except Overloaded:
        return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize(("number", "cause"), [(signal.SIGKILL, "pid"), (signal.SIGSTOP, "probe")])
def test_dead_instance_is_not_a_dead_variant(served, number, cause):
    """Of two instances the other one answers meanwhile; a variant is back with its only instance."""
    before = {model: served.metric("repairs_total", model=model) for model in ("slow", "single")}
    with calling(served, "look", 3) as look, calling(served, "alone", 3) as alone:
        wait_until(lambda: min(look.count(31.0), alone.count(41.0)) > 30, "answers")
        for model in before:
            os.kill(newest(served, model).process.pid, number)
        for model, count in before.items():
            wait_until(lambda m=model, c=count: served.metric("repairs_total", model=m) > c, model)
        wait_until(served.is_ready, "ready again")
        seen = look.count(31.0)
        wait_until(lambda: look.count(31.0) > seen + 10, "further answers")

    assert {*look.since()} == {31.0}
    assert "variant 'both': breaker open" not in served.log
    assert served.metric("repairs_total", model="slow", cause=cause) >= 1
    assert served.numbers("alone") == [41.0] * 4


def infer(served: Served, *shape: int) -> np.ndarray:
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{served.ports['grpc']}") as client:
        return client.infer("fragile", [client_input("grpc", "shape", np.array(shape))]).as_numpy("y")


def outcome(served: Served) -> str:
    try:
        answer = infer(served, 2, 2)
    except InferenceServerException as error:
        return str(error.message())
    return "right" if answer.tolist() == [[1, 1], [1, 1]] else f"wrong: {answer}"


@pytest.mark.slow
def test_instance_with_a_broken_device_is_replaced(served):
    before = {stub.process for stub in served.stubs("fragile")}

    with pytest.raises(InferenceServerException) as raised:
        infer(served, 3, 3)
    texts: Counter[str] = Counter()

    def is_repaired() -> bool:
        texts[outcome(served)[:27]] += 1
        return served.metric("repairs_total", model="fragile", cause="device") == 1

    wait_until(is_repaired, "repair")

    # Half of the processes still answer, and none of the others hangs.
    assert texts.keys() <= {"right", "unavailable: device failed:"}

    assert raised.value.message().startswith("unavailable: device failed: onnx runtime error 1: ")
    assert ILLEGAL_ACCESS in raised.value.message()
    assert infer(served, 2, 2).shape == (2, 2)
    wait_until(lambda: not before & {stub.process for stub in served.stubs("fragile")}, "new processes")
    assert "supervisor: model 'fragile' version 1 had a failed device" in served.log
    assert served.triton_metric("nereid_onnxruntime_device_failures_total", model="fragile") == 1


def counted(served: Served, to: str) -> float:
    return served.triton_metric("nereid_route_fallbacks_total", to=to)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_no_request_is_lost_with_the_default(served, number):
    before = counted(served, "spare")
    with calling(served, "spared", CALLERS) as calls:
        wait_until(lambda: calls.count(DEFAULT) > 50, "responses of the default")
        os.kill(newest(served, "first").process.pid, number)
        wait_until(lambda: counted(served, "spare") > before + 50, "responses of the fallback")
        wait_until(served.is_ready, "ready again")
        back = time.monotonic()
        wait_until(lambda: DEFAULT in calls.since(back), "responses of the default again")

    assert {*calls.since()} == {DEFAULT, SPARE}
    total = before + calls.count(SPARE)
    wait_until(lambda: counted(served, "spare") == total, f"{total} counted fallbacks")


@pytest.mark.slow
def test_answer_is_sent_while_no_variant_is_there(served):
    model_control, before = ModelControl(served.server_info), counted(served, "spare")
    answered = counted(served, "answer")
    with calling(served, "spared", CALLERS) as calls:
        wait_until(lambda: calls.count(DEFAULT) > 50, "responses of the default")
        model_control.unload("first")
        wait_until(lambda: counted(served, "spare") > before + 50, "responses of the fallback")
        model_control.unload("spare")
        wait_until(lambda: counted(served, "answer") > answered + 50, "configured answers")
        model_control.load("spare")
        model_control.load("first")
        wait_until(served.is_ready, "ready again")
        back = time.monotonic()
        wait_until(lambda: DEFAULT in calls.since(back), "responses of the default again")

    assert {*calls.since()} == {DEFAULT, SPARE, ANSWER}
    totals = answered + calls.count(ANSWER), before + calls.count(SPARE)
    wait_until(lambda: (counted(served, "answer"), counted(served, "spare")) == totals, f"{totals} counted")


def waited_for(supervisor: int) -> int:
    links = [str(link.readlink()) for link in Path(f"/proc/{supervisor}/fd").iterdir() if link.is_symlink()]
    return links.count("anon_inode:[pidfd]")


@pytest.mark.slow
def test_killed_server_comes_back_as_it_was(served):
    model_control, server_info = ModelControl(served.server_info), served.server_info
    versions, restarts = model_control.ready_versions(), served.metric("restarts_total")

    with calling(served, "eyes", 2) as calls:
        wait_until(lambda: calls.count(11.0) > 2, "first responses")
        os.kill(server_info.pid, signal.SIGKILL)
        wait_until(lambda: {*calls.since()} > {11.0}, "a failed request")
        assert served.page("/livez")[0] == 200
        wait_until(lambda: served.metric("restarts_total") == restarts + 1, "restart")
        wait_until(served.is_ready, "ready again")

    assert served.numbers("eyes", 20) == [11.0] * 20
    after = served.server_info
    assert after.pid != server_info.pid
    assert (after.ports, after.health_port) == (server_info.ports, server_info.health_port)
    assert after.token == server_info.token
    # A model whose first load fails for want of time is tried again.
    wait_until(lambda: model_control.ready_versions() == versions, "all models")
    assert "bare" in versions
    assert "--disable-auto-complete-config" not in command_of(served)
    assert group_members(server_info.pid) == []
    processes = 1 + len(stub_processes.find(after.pid, served.repository))
    wait_until(lambda: waited_for(served.process.pid) == processes, "each process has one open file")


@pytest.mark.slow
def test_complete_configs_are_not_completed(tmp_path):
    """The completion takes a second; a model that needs it is refused, and a restart has the same models."""
    repository = tmp_path / "repository"
    store_eyes(repository, "eyes", 10, more='name: "eyes"')
    with serving(repository, tmp_path / "run") as served:
        wait_until(served.is_ready, "ready")
        store(repository, "late", adding(1), config=None)
        with pytest.raises(
            Refused, match=r"'late': its config has no name, and .* fix: start nereid serve again"
        ):
            ModelControl(served.server_info).load("late")
        shutil.rmtree(repository / "late")
        os.kill(served.server_info.pid, signal.SIGKILL)

        wait_until(lambda: "tritonserver is ready again" in served.log, "restart")
        wait_until(served.is_ready, "ready again")
        assert "--disable-auto-complete-config" in command_of(served)
        assert served.numbers("eyes") == [11.0] * 2 * INSTANCES


@pytest.mark.nightly(minutes=3)
def test_every_repair_ends_after_an_addition(tmp_path):
    """A further model leaves each one fewer instances, and no repair waits for those that are gone."""
    repository = shutil.copytree(REPOSITORY, tmp_path / "repository")
    network = repository / "efficientnet_lite0"
    key_changes.add(tmp_path / "keys.json", "me", ["infer"], None)

    def kill_and_wait(pid: int, name: str) -> None:
        os.kill(pid, signal.SIGKILL)
        began_s = time.monotonic()
        served.why_not_ready()
        wait_until(served.is_ready, f"ready after the end of {name}")
        print(f"{name}: {time.monotonic() - began_s:.1f} s")

    with serving(repository, tmp_path / "run", "--guard", "--keys", str(tmp_path / "keys.json")) as served:
        words = "--name=more", "--preset=efficientnet_lite", "--labels", str(network / "labels.txt"), "--yes"
        served.run("add", str(network / "1" / "model.onnx"), *words)
        wait_until(served.is_ready, "ready")
        models = sorted({stub.model for stub in stub_processes.find(served.server_info.pid, repository)})
        for model in [model for model in models for _ in range(KILLS)]:
            kill_and_wait(newest(served, model).process.pid, f"a stub of '{model}'")
        for _ in range(KILLS):
            kill_and_wait(served.server_info.pid, "tritonserver")
        for _ in range(KILLS):
            (gateway,) = run_dir.find_gateways(served.base, repository)
            kill_and_wait(gateway.pid, "the gateway")

        # A restart repairs the last of too many dead instances.
        repairs = [served.metric("repairs_total", model=model) for model in models]
        assert sum(repairs) + served.metric("restarts_total") == KILLS * (len(models) + 1)
        assert max(repairs) <= KILLS
        assert served.is_ready(), served.log


@pytest.mark.slow
def test_restart_that_the_system_refuses_is_tried_again(tmp_path):
    """It refuses to write the run directory, as on a full disk."""
    store_eyes(tmp_path / "repository", "eyes", 1)
    with serving(tmp_path / "repository", tmp_path / "run") as served:
        wait_until(served.is_ready, "ready")
        (folder,) = {file.parent for file in served.base.rglob("server.json")}
        aside, pid = folder.with_name("aside"), served.server_info.pid
        folder.rename(aside)
        folder.touch()
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: "tritonserver cannot be started: [Errno " in served.log, "refused")
        folder.unlink()
        aside.rename(folder)

        wait_until(served.is_ready, "ready again")


def command_of(served: Served) -> list[str]:
    return Path(f"/proc/{served.server_info.pid}/cmdline").read_bytes().decode().split("\0")


@pytest.mark.slow
def test_server_that_another_program_tells_to_end_is_replaced(served):
    """The next one starts although a client keeps its connection, for which Triton would wait for 30 s."""
    first = served.server_info.pid
    with closing(HTTPConnection("127.0.0.1", served.ports["http"])) as client:
        client.request("GET", "/v2/health/live")
        client.getresponse().read()

        os.kill(first, signal.SIGTERM)

        wait_until(lambda: served.is_ready() and served.server_info.pid != first, "ready again")
    assert "tritonserver received a termination signal" in served.log
    assert "Exit timeout expired" not in served.log
    assert served.numbers("eyes", 1) == [11.0]


@pytest.mark.slow
def test_server_that_crashed_is_named_so_and_replaced(served):
    """Its handler may hang after this line, because the heap is damaged."""
    first = served.server_info.pid
    Path(f"/proc/{first}/fd/1").write_text("Signal (6) received.\n")
    wait_until(lambda: "Signal (6) received" in served.log, "the line")

    os.kill(first, signal.SIGSTOP)

    wait_until(lambda: served.server_info.pid != first and served.is_ready(), "ready again")
    assert "supervisor: tritonserver crashed with signal 6; restart" in served.log


@pytest.mark.slow
def test_model_that_writes_as_triton_does_not_end_the_server(served):
    """Models share the server's log, and may print what a caller sends."""
    first, before = served.server_info.pid, served.metric("repairs_total", model="eyes")
    Path(f"/proc/{first}/fd/1").write_text("Signal (15) received.\n")
    wait_until(lambda: "Signal (15) received" in served.log, "the line")

    os.kill(newest(served, "eyes").process.pid, signal.SIGKILL)
    # The process itself may stay a zombie: Triton 24.10 never collects one that failed a probe.
    wait_until(lambda: served.metric("repairs_total", model="eyes") == before + 1, "the repair")
    wait_until(served.is_ready, "ready again")

    assert (served.server_info.pid, served.numbers("eyes", 1)) == (first, [11.0])


@pytest.mark.nightly(minutes=1)
def test_server_that_cannot_start_again_is_tried_again(tmp_path):
    """Its reason is reported until it succeeds, with new models and without broken ones; SIGTERM ends it."""
    repository = tmp_path / "repository"
    store_eyes(repository, "eyes", 10)
    number = repository / "eyes.number"

    with serving(repository, tmp_path / "run") as served:
        wait_until(served.is_ready, "ready")
        number.write_text("no number")
        store_eyes(repository, "new", 20)
        os.kill(served.server_info.pid, signal.SIGKILL)
        failure = "tritonserver cannot be started: model 'eyes'"
        wait_until(lambda: served.log.count(failure) >= 2, "two attempts")
        assert (served.page("/livez")[0], "could not convert" in served.why_not_ready()) == (200, True)
        number.write_text("30")
        wait_until(served.is_ready, "ready again")
        assert (served.numbers("eyes", 1), served.numbers("new", 1)) == ([31.0], [21.0])

        store(repository, "broken", adding(1), config='backend: "none such"')
        os.kill(first := served.server_info.pid, signal.SIGKILL)
        wait_until(lambda: served.is_ready() and served.server_info.pid != first, "ready again")
        assert (served.numbers("eyes", 1), served.numbers("new", 1)) == ([31.0], [21.0])
        assert "--disable-auto-complete-config" not in command_of(served)

        number.write_text("no number")
        failures = served.log.count("cannot be started")
        os.kill(served.server_info.pid, signal.SIGKILL)
        wait_until(lambda: served.log.count("cannot be started") > failures, "a failed attempt")
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(WATCHDOG_S) == 0
    assert list((tmp_path / "run").glob("nereid-*/*/*")) == []


def signal_other_thread(pid: int, number: int) -> None:
    other = next(thread for path in Path(f"/proc/{pid}/task").iterdir() if (thread := int(path.name)) != pid)
    assert ctypes.CDLL(None).tgkill(pid, other, number) == 0
