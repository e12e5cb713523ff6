"""The values of `nereid top` from two readings, and its screen."""

import io
import json
import re
from dataclasses import asdict, fields, is_dataclass, replace

import pytest
from rich.console import Console

from nereid.backends.routing.assignment import parse_route
from nereid.backends.triton.stub_processes import Process
from nereid.base.prometheus_text import MetricSamples
from nereid.cli.top import view
from nereid.insight.observe import top
from nereid.server.run_dir import GatewayInfo
from nereid.server.supervision.process_usage import Usage
from tests.conftest import ROOT
from tests.routes import document, variant

SERVER = top.TopServer(50, "127.0.0.1", {"http": 8000, "metrics": 8002}, "cpu", 60.0, True, {}, "")
GATEWAY = GatewayInfo(60, "127.0.0.1", 8080)
SHADOW = {"name": "next", "model": "dogs_v3", "version": 1, "percent": 20}
VARIANTS = variant("v1", "dogs_v1", 3), variant("v2", "dogs_v2", 1)
ROUTE = parse_route(json.dumps(document(*VARIANTS, generation=3, shadows=[SHADOW])).encode())


def requests(v1: int, v2: int, failed: int = 0, instance: str = "a") -> str:
    template = 'nereid_route_requests_total{{model_instance="{}",route="dogs",variant="{}",outcome="{}"}} {}'
    rows = (("v1", "ok", v1), ("v2", "ok", v2), ("v2", "inference_failed", failed), ("v2", "overloaded", 1))
    return "\n".join(template.format(instance, *row) for row in rows)


def model(name: str, count: int, queue_us: int = 0, compute_us: int = 0, runs: int = 0) -> str:
    """Return Triton's counts of a model."""
    values = {"request_success": count, "queue_duration_us": queue_us}
    values |= {"compute_input_duration_us": compute_us, "compute_infer_duration_us": compute_us}
    values |= {"compute_output_duration_us": compute_us, "count": 2 * count}
    values |= {"exec_count": runs, "pending_request_count": 3}
    labels = f'model="{name}",version="1"'
    return "\n".join(f"nv_inference_{metric}{{{labels}}} {value}" for metric, value in values.items())


def usage(pid: int, name: str, cpu_s: float, version: int = 0) -> Usage:
    return Usage(Process(pid, pid), name, version, cpu_s, 1000 * pid)


def reading(read_s: float, text: str = "", **changed: object) -> top.ServerReading:
    cores = {0: (int(10 * read_s), int(100 * read_s))}
    page = MetricSamples.parse(f'nereid_route_generation{{route="dogs"}} 3\n{text}')
    machine = top.TopMachine((), (1.0, 2.0, 3.0), 8000, 6000, 2.0, None, top.read_gpus(page))
    plain = top.ServerReading(read_s, SERVER, page, (), machine, cores, [], {"dogs": ROUTE}, {})
    return replace(plain, **changed)  # type: ignore[arg-type]


def variant_of(found: top.Top, name: str) -> top.TopVariant:
    (route,) = found.routes
    return next(entry for entry in route.variants if entry.name == name)


def test_variants_have_their_part_of_the_growth():
    figures = top.measure(
        reading(10, requests(100, 100)),
        reading(12, requests(130, 110, failed=4) + "\n" + requests(10, 0, instance="b")),
    )

    first, second = variant_of(figures, "v1"), variant_of(figures, "v2")
    assert figures.seconds == 2
    assert (first.weight, first.expected_share, first.requests_per_s) == (3, 0.75, 20.0)
    # 40 and 15, since the second instance's rejected request is new.
    assert first.share == pytest.approx(40 / 55)
    assert (second.requests_per_s, second.errors_per_s) == (7.5, 2.0)
    assert (first.model, first.version, first.breaker) == ("dogs_v1", 1, None)


def test_latency_is_that_of_successful_requests():
    text = "\n".join(
        f'nereid_route_request_duration_seconds_bucket{{route="dogs",variant="v1",outcome="{outcome}",'
        f'le="{bound}"}} {count}'
        for outcome, counts in {"ok": (100, 100), "inference_failed": (0, 900)}.items()
        for bound, count in zip(("0.01", "+Inf"), counts, strict=True)
    )
    state = 'nereid_route_breaker_state{{route="dogs",variant="v1",model_instance="{0}"}} {0}'
    states = "\n".join(map(state.format, (0, 2, 1)))

    v1 = variant_of(top.measure(reading(10), reading(12, f"{text}\n{states}")), "v1")

    assert (v1.p50_ms, v1.p99_ms) == (pytest.approx(5), pytest.approx(9.9))
    assert v1.breaker == "open"


def test_shadow_agrees_as_a_share_of_the_compared():
    text = "\n".join(
        f'nereid_route_shadow_requests_total{{route="dogs",shadow="next",outcome="{outcome}"}} {count}'
        for outcome, count in {"agreed": 6, "disagreed": 1, "failed": 1, "shed": 90}.items()
    )

    (shadow,) = top.measure(reading(10), reading(12, text)).routes[0].shadows

    assert (shadow.name, shadow.percent, shadow.agreement, shadow.requests_per_s) == ("next", 20.0, 0.75, 4.0)


def test_models_have_means_of_the_interval():
    before = reading(10, model("dogs_v1", 100, 5000, 1000, 10), usage=[usage(7, "dogs_v1", 1.0, 1)])
    text = model("dogs_v1", 110, 25_000, 11_000, 15) + "\n" + model("cats", 0)
    used = [usage(7, "dogs_v1", 1.5, 1), usage(8, "dogs_v1", 0.5, 1), usage(9, "dogs_v1", 9.0, 2)]

    idle, busy = top.measure(before, reading(12, text, usage=used)).models

    assert busy == top.TopModel("dogs_v1", 1, 2, 5.0, 2.0, 3.0, 4.0, 3.0, 50.0, 15_000)
    assert idle == top.TopModel("cats", 1, None, 0.0, None, None, None, 3.0, None, None)


def test_versions_are_in_the_order_of_their_numbers():
    text = "\n".join(model("eyes", 1).replace('version="1"', f'version="{number}"') for number in (10, 9, 2))

    assert [row.version for row in top.measure(reading(10, text), reading(12, text)).models] == [2, 9, 10]


def test_a_restart_is_named_and_its_counts_are_new():
    """The new server has counted only since its start, which lies in the interval."""
    restarted = reading(12, requests(104, 0), server=replace(SERVER, pid=51))
    figures = top.measure(reading(10, requests(100, 100)), restarted)

    assert variant_of(figures, "v1").requests_per_s == 52.0
    assert figures.notes == ["tritonserver restarted: pid 50 became 51"]
    assert top.measure(reading(10, server=None, samples=None), reading(12)).notes == []


@pytest.mark.parametrize("side", ["before", "after"])
def test_without_two_pages_there_are_no_rates(side):
    both = {"before": reading(10), "after": reading(12)}
    both[side] = replace(both[side], samples=None, server=replace(SERVER, ready=False, trouble="no metrics"))

    figures = top.measure(**both)

    assert (figures.seconds, figures.routes, figures.models) == (None, [], [])
    assert figures.server.ready == (side == "before")
    assert figures.machine is not None


def test_machine_has_busy_cores_and_the_gpus_of_triton():
    text = 'nv_gpu_utilization{gpu_uuid="GPU-1"} 0.5\nnv_gpu_power_usage{gpu_uuid="GPU-2"} 70'
    machine = top.measure(reading(10), reading(12, text)).machine

    assert (list(machine.cores_busy), machine.limit_cores, machine.limit_memory_bytes) == ([0.1], 2.0, None)
    gpus = [(gpu.uuid, gpu.busy, gpu.power_w) for gpu in machine.gpus]
    assert gpus == [("GPU-1", 0.5, None), ("GPU-2", None, 70.0)]


def gateway(read_s: float, predicted: int, shed: int, problem: str = "") -> top.GatewayReading:
    text = f"""nereid_gateway_requests_total{{endpoint="/predict",model="dogs",outcome="ok"}} {predicted}
nereid_gateway_requests_total{{endpoint="/predict",model="dogs",outcome="overloaded"}} {shed}
nereid_gateway_requests_total{{endpoint="/metrics",model="",outcome="ok"}} {predicted * 1000}
nereid_gateway_in_flight 4
nereid_gateway_limit 24"""
    return top.GatewayReading(read_s, GATEWAY, None if problem else MetricSamples.parse(text), problem, [])


def test_gateway_counts_requests_of_models():
    before, after = (reading(10, gateways=[gateway(10, 100, 0)]), reading(12, gateways=[gateway(12, 140, 6)]))

    (row,) = top.measure(before, after).gateways

    assert (row.requests_per_s, row.shed_per_s, row.in_flight, row.waiting) == (23.0, 3.0, 4.0, None)

    closed = [gateway(12, 0, 0, "its metrics need a key")]
    (row,) = top.measure(reading(10, gateways=closed), reading(12, gateways=closed)).gateways
    assert (row.trouble, row.requests_per_s, row.limit) == ("its metrics need a key", None, None)


def lines(found: top.Top, width: int, height: int | None = None) -> list[str]:
    console = Console(file=(file := io.StringIO()), width=width, force_terminal=False)
    console.print(view(found, width, height, "every 2 s; q quits"))
    return file.getvalue().splitlines()


REASON = "the process of 'dogs_0_0' is dead, and longer than any terminal " * 3


def full(models: int = 3) -> top.Top:
    names = [f"a-rather-long-name-of-a-model-{number}" for number in range(models)]
    text = "\n".join(model(name, 10**6 * n, 10**9, 10**9, 10**5) for n, name in enumerate(names, start=1))
    return top.measure(
        reading(10, gateways=[gateway(10, 0, 0)], usage=[usage(5, "tritonserver", 0)]),
        reading(
            12,
            requests(10**6, 10**6) + "\n" + text,
            server=replace(SERVER, ready=False, not_ready={"dogs": REASON}),
            gateways=[gateway(12, 10**6, 10**6)],
            usage=[usage(5, "tritonserver", 3), usage(6, "supervisor", 0)],
        ),
    )


@pytest.mark.parametrize("width", [80, 100, 200])
def test_no_line_is_wrapped(width):
    shown = lines(full(), width)

    assert shown[0].startswith("not ready  up 1 min  profile cpu  127.0.0.1 http 8000")
    assert shown[1].startswith("  dogs: the process of 'dogs_0_0' is dead")
    assert max(map(len, shown)) <= width
    assert len(shown) == len(lines(full(), 1000))
    row = next(line for line in shown if line.startswith("dogs") and "v1" in line)
    assert "500k" in row
    assert ("dogs_v1" in row) == (width >= 100)
    assert [line.split()[1:] for line in shown if line.startswith("a-rather")] == [
        ["1", "-", "500k", "1.00", "3.00", "20.0", "3", "-", "-"],
        ["1", "-", "1000k", "0.50", "1.50", "40.0", "3", "-", "-"],
        ["1", "-", "1500k", "0.33", "1.00", "60.0", "3", "-", "-"],
    ]


def test_screen_fits_its_height():
    shown = lines(full(models=40), 80, 24)

    assert len(shown) <= 24
    assert re.match("… [0-9]+ more models", shown[-2])
    assert any("20000k" in line for line in shown)
    assert shown[-1].startswith("every 2 s")


def test_every_key_of_the_json_is_documented():
    text = (ROOT / "docs" / "slow_requests.md").read_text().partition("\n### JSON\n")[2]
    cells = re.findall(r"^\| (`[^|]*`) \|", text, re.MULTILINE)
    kinds = [kind for name, kind in vars(top).items() if name.startswith("Top") and is_dataclass(kind)]

    keys = {field.name for kind in kinds for field in fields(kind)}
    assert {*re.findall(r"`(\w+)`", " ".join(cells))} == keys
    json.dumps(asdict(full()))
