"""One line per request, joined from the records of its processes.

A line contains ids, variant, outcome, top class, image, and the milliseconds of each stage, but never pixels
or keys.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from nereid.base.tracing.records import Record

# In request order; the stages of a task's models go between the two tuples. `transport` is between gateway
# and route, `retry` covers the attempts before the last, `queue` is the wait for an instance, `hop` is
# between the models of an ensemble, and `response` is from the last model back to the route.
FIRST_STAGES = ("receive", "admission", "transport", "route", "retry", "queue", "decode", "resize")
LAST_STAGES = ("hop", "network", "model", "response")


def in_order(stages: Iterable[str]) -> list[str]:
    """Return stage names in request order; task-specific stages keep their own order."""
    positions = {name: position - len(FIRST_STAGES) for position, name in enumerate(FIRST_STAGES)}
    positions |= {name: position for position, name in enumerate(LAST_STAGES, 1)}
    return sorted(stages, key=lambda name: positions.get(name, 0))


def request_log_entries(records: Sequence[Record]) -> Iterator[dict[str, Any]]:
    """Yield one line per request of a trace, given all of the trace's records."""
    trace = _TraceRecords(records)
    for record in records:
        if record["kind"] == "route":
            yield trace.of_route(record)
        elif record["kind"] == "model" and trace.is_first_without_route(record):
            yield trace.of_models(record)
        elif record["kind"] == "gateway" and not trace.has_reached_server(record):
            yield _line(record, _stages_of_gateway(record, ""), record)


class _TraceRecords:
    def __init__(self, records: Sequence[Record]) -> None:
        self._inferences: dict[str, tuple[Record, Record]] = {}
        self._attempts: dict[str, list[Record]] = defaultdict(list)
        self._models: dict[str, list[Record]] = defaultdict(list)
        self._inside: set[str] = set()
        self._parents = {record["parent"] for record in records}
        for record in records:
            kind = record["kind"]
            if kind == "gateway":
                children = (span for span in record.get("inner", ()) if "span" in span)
                self._inferences |= {inference["span"]: (record, inference) for inference in children}
            elif kind == "route":
                self._attempts[record["span"]] += record.get("inner", ())
                self._inside |= {attempt["span"] for attempt in record.get("inner", ())}
            elif kind == "model":
                self._models[record["parent"]].append(record)
                self._inside.add(record["span"])  # a reader sends requests to its networks
            else:  # an attempt that returned after the response, or a shadow
                self._attempts[record["parent"]].append(record)
                self._inside.add(record["span"])
        for spans in (*self._attempts.values(), *self._models.values()):
            spans.sort(key=lambda span: span["begin"])

    def is_first_without_route(self, model: Record) -> bool:
        """Return whether a model received its request without a route and is that request's first step."""
        parent = model["parent"]
        return parent not in self._inside and (not parent or self._models[parent][0] is model)

    def has_reached_server(self, gateway: Record) -> bool:
        """Return whether the server recorded a request made to the gateway."""
        return any(span.get("span") in self._parents for span in gateway.get("inner", ()))

    def of_route(self, route: Record) -> dict[str, Any]:
        """Return the line for a request to a route."""
        route = self._until_response(route, route["parent"])
        attempts = self._attempts[route["span"]]
        earlier, last = attempts[:-1], attempts[-1] if attempts else None
        attempts_ms = sum(_ms_within(attempt, route) for attempt in attempts)
        stages = {"route": _ms(route) - attempts_ms}
        if earlier:
            stages["retry"] = sum(_ms_within(attempt, route) for attempt in earlier)
        models = self._models[last["span"]] if last else []
        if last and models and last["end"] <= route["end"]:
            stages |= _stages_of_models(models)
            stages["queue"] = (models[0]["begin"] - last["begin"]) / 1e6
            stages["response"] = (last["end"] - models[-1]["end"]) / 1e6
        elif last:
            stages["model"] = _ms_within(last, route)
        return self._joined(route, stages, models)

    def of_models(self, first: Record) -> dict[str, Any]:
        """Return the line for a request to a model without a route."""
        models = self._models[first["parent"]] if first["parent"] else [first]
        models = [*models[:-1], self._until_response(models[-1], first["parent"])]
        whole = first | {"end": models[-1]["end"]}
        return self._joined(whole, _stages_of_models(models), models)

    def _until_response(self, record: Record, parent: str) -> Record:
        """Return a record without the work that continued after the gateway had the response."""
        _, inference = self._inferences.get(parent, (None, record))
        return record | {"end": min(record["end"], inference["end"])}

    def _joined(self, record: Record, stages: dict[str, float], models: Sequence[Record]) -> dict[str, Any]:
        gateway, inference = self._inferences.get(record["parent"], (None, None))
        if gateway and inference:
            stages |= _stages_of_gateway(gateway, record["parent"])
            stages["transport"] = _ms(inference) - _ms(record)
        line = _line(record, stages, gateway)
        if gateway and sum("span" in span for span in gateway["inner"]) > 1:
            # One of several images: the request as a whole took longer.
            line["ms"] = round(sum(line["stages_ms"].values()), 3)
        return line | _of_images(models)


def _line(record: Record, stages: dict[str, float], gateway: Record | None) -> dict[str, Any]:
    whole = gateway or record
    attributes = (gateway["about"] if gateway else {}) | record["about"]
    started_at = datetime.fromtimestamp(whole["begin"] / 1e9, UTC).isoformat(timespec="milliseconds")
    return {
        "time": started_at.replace("+00:00", "Z"),
        "request_id": whole.get("id") or record.get("id", ""),
        "trace_id": record["trace"],
        "name": record["name"],
        **attributes,
        **({"error": record["error"]} if "error" in record else {}),
        "ms": _ms(whole),
        "stages_ms": {name: round(max(0.0, stages[name]), 3) for name in in_order(stages)},
    }


def _stages_of_gateway(gateway: Record, inference: str) -> dict[str, float]:
    """Return the stages before one inference, leaving out a batch's other inferences."""
    return {
        span["name"]: _ms(span)
        for span in gateway.get("inner", ())
        if span["name"] == "receive"
        or (span["name"] == "admission" and span.get("of", "") in ("", inference))
    }


def _stages_of_models(models: Sequence[Record]) -> dict[str, float]:
    stages: dict[str, float] = defaultdict(float)
    for model in models:
        for name, milliseconds in _stages_of_model(model).items():
            stages[name] += milliseconds
    if len(models) > 1:
        gaps = zip(models[1:], models, strict=False)
        stages["hop"] = sum(later["begin"] - earlier["end"] for later, earlier in gaps) / 1e6
    return dict(stages)


def _stages_of_model(model: Record) -> dict[str, float]:
    """Return the stages of a batch; images decoded in parallel count only their combined elapsed time."""
    stages: dict[str, float] = {}
    for name in dict.fromkeys(span["name"] for span in model.get("inner", ())):
        parts = [span for span in model["inner"] if span["name"] == name]
        whole = (max(part["end"] for part in parts) - min(part["begin"] for part in parts)) / 1e6
        stages[name] = min(whole, sum(map(_ms, parts)))
    stages["model"] = _ms(model) - sum(stages.values())
    return stages


def _of_images(models: Sequence[Record]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for model in models:
        attributes = model["about"]
        fields["batch_size"] = attributes.get("batch_size", 0)
        fields["core_wait_ms"] = round(
            fields.get("core_wait_ms", 0.0) + attributes.get("core_wait_ms", 0.0), 3
        )
        images = [span["about"] for span in model.get("inner", ()) if "format" in span.get("about", {})]
        if images:
            fields["images"] = images
    return fields


def _ms(span: Record) -> float:
    return float(round((span["end"] - span["begin"]) / 1e6, 3))


def _ms_within(span: Record, whole: Record) -> float:
    return float(max(0.0, (min(span["end"], whole["end"]) - span["begin"]) / 1e6))
