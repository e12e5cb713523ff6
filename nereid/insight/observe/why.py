"""Why requests were slow or failed: their recorded stages, compared with those of typical requests."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from nereid.base.errors import OperationFailed
from nereid.base.task_registry import TASKS
from nereid.base.tracing.collector import read_records
from nereid.base.tracing.records import Record
from nereid.base.tracing.request_log import in_order, request_log_entries
from nereid.insight.observe.contention import Contention
from nereid.server.run_dir import ServerInfo

Line = Mapping[str, Any]
# This fraction of requests counts as slow; the typical ones are those around the median.
SLOW_SHARE, TYPICAL = 0.05, (0.4, 0.6)
MIN_SLOW = 3
# Minimum fractions for reporting something as the cause.
FAILED_SHARE = 0.05
WAIT_SHARE = 0.25
WAIT_RATIO = 0.5
OTHER_CORES_SHARE = 0.3
VARIANT_SHARE = 0.8
# A variant that serves more of all requests serves most of the slow ones by chance.
MAX_USUAL_SHARE = 0.6
SLOWER = 1.5
# Below this, the server is idle, and the current counts say nothing about past requests.
IDLE_CORES = 0.1

MEANINGS = {
    "receive": (
        "the caller sends its image slowly",
        "compare with a client on this machine, or smaller images",
    ),
    "admission": (
        "the gateway holds requests back, because the server is full",
        "nereid top; then reduce the load, or add cores or a server",
    ),
    "transport": (
        "requests wait between gateway and route, in tritonserver",
        "nereid top; a machine without a free core delays this stage first",
    ),
    "route": (
        "the route itself is slow",
        "nereid route show; many shadows or a busy machine delay the route",
    ),
    "retry": (
        "first attempts fail, and requests go to another variant or instance",
        "nereid status; nereid route show; the supervisor's log has repairs",
    ),
    "queue": (
        "requests wait for a free instance of the model",
        "nereid tune, more instances in the config, or more cores",
    ),
    "decode": (
        "decoding the images is slow",
        "send JPEG instead of PNG, or smaller images; look at the sizes above",
    ),
    "resize": ("resizing the images is slow", "send smaller images; look at the sizes above"),
    "hop": (
        "the steps of the ensemble wait for each other",
        "the profile cpu, which runs both steps in one process",
    ),
    "network": ("running the network is slow", "nereid tune, a network in INT8, or a GPU"),
    "model": ("the model's own code is slow", "profile the process of the model, for example with py-spy"),
    "response": (
        "the response returns slowly from the model to the route",
        "nereid top; a machine without a free core delays wake-ups and copies",
    ),
}
FAILURES = {
    "invalid_image": "look at the callers; `nereid why --request ID` shows one of these requests",
    "invalid_request": "look at the callers; `nereid why --request ID` shows one of these requests",
    "overloaded": "nereid top; reduce the load, or add cores or a server",
    "deadline_exceeded": "look at the stages above; then nereid top",
    **dict.fromkeys(
        (
            "client_closed",
            "too_large",
            "body_timeout",
            "rate_limited",
            "not_found",
            "unauthenticated",
            "forbidden",
        ),
        "look at the callers; the gateway's --access-log has each of these requests",
    ),
    "unavailable": "nereid status; nereid route show; the supervisor's log has repairs",
}
FIX_FAILURE = "nereid status; the server's log has the reason"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Why requests of a window were slow or failed.

    Attributes:
        requests: number of requests.
        outcomes: their number by outcome, without `ok`.
        p50_ms, p99_ms: latency of the successful ones.
        typical_ms, slow_ms: mean of each stage of typical and of slow requests.
        slow_variant: the variant of nearly all slow requests, "" if they have several.
        image_bytes: mean size of an image, of typical and of slow requests.
        core_wait_ms: mean wait of an instance for a core, of typical and of slow requests.
        cause: a stage, an outcome, `cores`, or "" if nothing is wrong or the objective is met.
        why, next_step: the cause in words, and a command or change to try.
    """

    requests: int
    outcomes: Mapping[str, int]
    p50_ms: float
    p99_ms: float
    typical_ms: Mapping[str, float]
    slow_ms: Mapping[str, float]
    slow_variant: str
    image_bytes: tuple[float, float]
    core_wait_ms: tuple[float, float]
    cause: str
    why: str
    next_step: str


def explain(lines: Sequence[Line], contention: Contention, objective_ms: float = 0.0) -> Diagnosis:
    """Explain the requests of a window.

    Args:
        objective_ms: time within which 99 % of the requests are fast enough; 0 for none.
    """
    outcomes = Counter(_outcome(line) for line in lines)
    good = sorted((line for line in lines if _outcome(line) == "ok"), key=_ms)
    del outcomes["ok"]
    slow = good[-max(MIN_SLOW, round(len(good) * SLOW_SHARE)) :]
    typical = good[int(len(good) * TYPICAL[0]) : max(1, int(len(good) * TYPICAL[1]) + 1)]
    p99_ms = _ms(good[min(len(good) - 1, int(len(good) * 0.99))]) if good else 0.0
    cause, why, next_step = _cause(lines, outcomes, typical, slow, contention)
    if cause and cause not in outcomes and p99_ms <= objective_ms:
        why = (
            f"99 % of the requests meet the objective of {objective_ms:g} ms; the others show: {cause}, {why}"
        )
        cause = ""
    return Diagnosis(
        requests=len(lines),
        outcomes=dict(outcomes),
        p50_ms=_ms(good[len(good) // 2]) if good else 0.0,
        p99_ms=p99_ms,
        typical_ms=_stages(typical),
        slow_ms=_stages(slow),
        slow_variant=_dominant(good, slow),
        image_bytes=(_bytes(typical), _bytes(slow)),
        core_wait_ms=(_wait(typical), _wait(slow)),
        cause=cause,
        why=why,
        next_step=next_step,
    )


def _cause(
    lines: Sequence[Line],
    outcomes: Counter[str],
    typical: Sequence[Line],
    slow: Sequence[Line],
    contention: Contention,
) -> tuple[str, str, str]:
    """Return the cause, in words, and the next step; the most severe one that applies."""
    if not lines:
        return "", "no requests in this time", "send one: nereid classify photo.jpg"
    failed = outcomes.most_common(1)
    if failed and failed[0][1] >= FAILED_SHARE * len(lines):
        name, count = failed[0]
        error = next(
            (str(line["error"]) for line in lines if _outcome(line) == name and line.get("error")), ""
        )
        example = f", such as: {error[:200]}" if error else ""
        why = f"{count:,} of {len(lines):,} requests failed: {name}{example}"
        return name, why, FAILURES.get(name, FIX_FAILURE)
    if why := _short_of_cores(slow, contention):
        return "cores", why, "end other programs, reduce the load, or add cores; nereid top shows both"
    if not slow:
        return "", "no successful request", FIX_FAILURE
    before, after = _stages(typical), _stages(slow)
    excess = {name: after[name] - before.get(name, 0.0) for name in after}
    stage = max(excess, key=lambda name: excess[name])
    if fmean(map(_ms, slow)) < SLOWER * fmean(map(_ms, typical)):
        stage = max(after, key=lambda name: after[name])
        return (
            "",
            f"no request is much slower than the others; most of their time is in '{stage}'",
            "nereid tune",
        )
    return stage, *meaning(stage)


def meaning(stage: str) -> tuple[str, str]:
    """Return the cause of a slow stage, and the next step; a task defines both for its own stages."""
    if stage in MEANINGS:
        return MEANINGS[stage]
    meanings = ((task.entry_point("stages") or {}).get(stage) for task in TASKS)
    return next(filter(None, meanings), (f"the stage '{stage}' is slow", "nereid tune"))


def _short_of_cores(slow: Sequence[Line], contention: Contention) -> str:
    """Return why requests wait for a core, if they do."""
    full = contention.own_cores + contention.other_cores > 0.9 * contention.cores
    others = contention.other_cores
    wait, total = _wait(slow), fmean(map(_ms, slow)) if slow else 0.0
    is_waiting = (total and wait > WAIT_SHARE * total) or (full and contention.wait_ratio > WAIT_RATIO)
    if contention.throttled > WAIT_SHARE:
        return f"the limit of the control group stops the server in {contention.throttled:.0%} of its periods"
    if not is_waiting:
        return ""
    if contention.own_cores < IDLE_CORES:
        return f"the models waited {wait:.1f} of {total:.1f} ms for a core; the server is idle now"
    if others < OTHER_CORES_SHARE * contention.cores:
        return ""
    return f"other programs use {others:.1f} of {contention.cores} cores, and the models wait for a core"


def _outcome(line: Line) -> str:
    return str(line.get("outcome") or ("failed" if line.get("error") else "ok"))


def _ms(line: Line) -> float:
    return float(line["ms"])


def _stages(lines: Sequence[Line]) -> dict[str, float]:
    known = [name for task in TASKS for name in task.entry_point("stages") or ()]
    stages = sorted({name for line in lines for name in line["stages_ms"]})
    names = in_order(sorted(stages, key=lambda name: known.index(name) if name in known else len(known)))
    return {name: fmean(line["stages_ms"].get(name, 0.0) for line in lines) for name in names}


def _bytes(lines: Sequence[Line]) -> float:
    sizes = [image["bytes"] for line in lines for image in line.get("images", ())]
    return fmean(sizes) if sizes else 0.0


def _wait(lines: Sequence[Line]) -> float:
    return fmean(line.get("core_wait_ms", 0.0) for line in lines) if lines else 0.0


def _dominant(lines: Sequence[Line], slow: Sequence[Line]) -> str:
    """Return the variant of nearly all slow requests, if it serves a smaller part of all requests."""
    ((name, count),) = Counter(line.get("variant", "") for line in slow).most_common(1) or [("", 0)]
    share = sum(line.get("variant", "") == name for line in lines) / max(1, len(lines))
    is_dominant = name and count >= VARIANT_SHARE * len(slow) and share <= MAX_USUAL_SHARE
    return name if is_dominant else ""


def recorded_requests(server_info: ServerInfo, since: float = 0.0) -> Iterator[dict[str, Any]]:
    """Yield the line of each request that `nereid serve` recorded; damaged records are skipped.

    Args:
        since: only requests that ended after this Unix time, in seconds.

    Raises:
        OperationFailed: the server records no requests.
    """
    if not server_info.records:
        raise OperationFailed(
            "this server records no requests: expected one that `nereid serve` started without --no-trace"
        )
    traces: dict[str, list[Record]] = defaultdict(list)
    for trace_record in read_records(Path(server_info.records)):
        if trace_record["end"] >= since * 1e9:
            traces[trace_record["trace"]].append(trace_record)
    for records in traces.values():
        yield from request_log_entries(records)
