"""Traces in memory, the choice of the traces to keep, and journals with their damages."""

import errno
import json
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct

from nereid.base.errors import OperationFailed
from nereid.base.journal import Journal
from nereid.base.tracing import collector, request_log
from nereid.base.tracing.collector import (
    HOLD_S,
    MAX_KEPT_PER_S,
    MAX_TRACES,
    TailSampler,
    append_records,
    read_records,
    receiving,
)
from nereid.base.tracing.context import TraceContext, continue_or_start_trace, parse_traceparent
from nereid.base.tracing.records import CALLER, MAX_WAITING, SERVER, Sampling, Tracer, never_raises
from tests.routes import wait_until
from tests.tables import cases

TRACE, SPAN = "a" * 32, "b" * 16
MS = 10**6


@given(st.binary(min_size=16, max_size=16), st.binary(min_size=8, max_size=8), st.booleans())
def test_context_survives_its_header(trace, span, is_sampled):
    context = TraceContext(trace.hex(), span.hex(), is_sampled)

    assert parse_traceparent(str(context)) == (context if any(trace) and any(span) else None)


@cases(
    not_sampled=(f"00-{TRACE}-{SPAN}-00", False),
    sampled=(f"00-{TRACE}-{SPAN}-01", True),
    other_flag=(f"00-{TRACE}-{SPAN}-02", False),
    sampled_and_other_flag=(f"00-{TRACE}-{SPAN}-03", True),
    future_version=(f"cc-{TRACE}-{SPAN}-01-more", True),
    invalid_version=(f"ff-{TRACE}-{SPAN}-01", None),
    more_in_version_0=(f"00-{TRACE}-{SPAN}-01-more", None),
    upper_case=(f"00-{TRACE.upper()}-{SPAN}-01", None),
    zero_trace=(f"00-{'0' * 32}-{SPAN}-01", None),
    zero_span=(f"00-{TRACE}-{'0' * 16}-01", None),
    newline=(f"00-{TRACE}-{SPAN}-01\n", None),
    empty=("", None),
)
def test_only_valid_headers_say_whether_the_trace_is_sampled(header, is_sampled):
    context = parse_traceparent(header)
    assert (context.is_sampled if context else None) is is_sampled


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_share_of_new_traces(share):
    assert all(continue_or_start_trace(None, share)[0].is_sampled == bool(share) for _ in range(100))
    context, parent = continue_or_start_trace(parse_traceparent(f"00-{TRACE}-{SPAN}-01"), share)
    assert (context.trace_id, context.is_sampled, parent) == (TRACE, True, SPAN)


def test_records_without_a_collector_are_bounded():
    tracer = Tracer("/nowhere", Sampling())
    for number in range(3 * MAX_WAITING):
        tracer.send({"trace": str(number)})

    assert len(tracer._waiting) <= MAX_WAITING


def record(kind, name, span, parent, begin, end, **more):
    ids = {"trace": TRACE, "span": span, "parent": parent, "about": {}}
    return {"kind": kind, "name": name, **ids, "begin": begin * MS, "end": end * MS, **more}


def part(name, begin, end, **more):
    return {"name": name, "begin": begin * MS, "end": end * MS, **more}


ADMITTED = [part("receive", 0, 5), part("admission", 5, 8, of="i"), part("inference", 8, 99, span="i")]
GATEWAY = record("gateway", "gateway /predict", "g", "", 0, 100, id="mine", inner=ADMITTED)
ROUTE = record("route", "route r", "r", "i", 10, 95, inner=[part("attempt v1", 12, 92, span="t")])
STEPS = [
    part("decode", 31, 41, about={"format": "PNG", "bytes": 9}),
    part("resize", 41, 43),
    part("network", 45, 85),
]
MODEL = record("model", "m", "m", "t", 30, 90, about={"batch_size": 2, "core_wait_ms": 1.5}, inner=STEPS)


def lines(*records):
    return list(request_log.request_log_entries(records))


def encoded(*records):
    return [json.dumps(entry).encode() for entry in records]


def test_line_divides_the_time_of_a_request():
    (line,) = lines(MODEL, GATEWAY, ROUTE)

    around = {"receive": 5, "admission": 3, "transport": 6, "route": 5, "queue": 18, "response": 2}
    assert line["stages_ms"] == around | {"decode": 10, "resize": 2, "network": 40, "model": 8}
    assert (line["ms"], line["request_id"], line["batch_size"]) == (100, "mine", 2)
    assert sum(line["stages_ms"].values()) == 99


def test_steps_of_an_ensemble_are_added():
    second = record("model", "n", "n", "t", 65, 90, inner=[part("network", 66, 86)])

    (line,) = lines(second, ROUTE, MODEL | {"end": 60 * MS, "inner": MODEL["inner"][:2]})

    assert line["stages_ms"].items() >= {"hop": 5, "network": 20, "response": 2}.items()


@cases(
    rejected_by_the_gateway=([GATEWAY | {"error": "overloaded"}], ["gateway /predict"]),
    without_a_gateway=([ROUTE, MODEL], ["route r"]),
    model_without_a_route=([MODEL | {"parent": ""}], ["m"]),
    model_of_a_shadow=([record("shadow", "shadow s", "s", "", 0, 9), MODEL | {"parent": "s"}], []),
)
def test_each_request_has_one_line(records, names):
    assert [line["name"] for line in lines(*records)] == names


def exporting():
    spans = []
    return TailSampler(lambda lines: None, spans.extend), spans


def kept(requests, seconds=1.0):
    """Return what is kept of some seconds; each request has a trace of its own, unless it names another."""
    traces, spans = exporting()
    for number, request in enumerate(requests):
        now_s = 100 + number * seconds / len(requests)
        traces.add(encoded(ROUTE | {"trace": f"{number:032x}", "inner": [], **request}), now_s)
        traces.expire(now_s)
    traces.close(100 + seconds + HOLD_S)
    return spans


def test_traces_are_kept_for_a_reason_and_at_a_limited_rate():
    assert kept([{}] * 10) == []
    assert len(kept([{"sampled": True}] * 10)) == 10
    assert len(kept([{"keep": SERVER}] * 10)) == 10
    assert len(kept([{"keep": CALLER}] * 10)) == 10
    assert len(kept([{"sampled": True}] * 5000, seconds=2)) <= 3 * MAX_KEPT_PER_S + 1
    assert len(kept([{"keep": CALLER}] * 5000, seconds=2)) <= 2.5 * MAX_KEPT_PER_S + 1


def test_one_trace_of_many_requests_is_limited():
    spans = kept([{"trace": TRACE, "sampled": True}] * 20_000, seconds=20)

    assert len(spans) < 5 * MAX_KEPT_PER_S * 20


def test_flood_of_samples_leaves_room_for_failures():
    spans = kept(([{"keep": SERVER}] + [{"sampled": True}] * 999) * 10, seconds=10)

    assert sum("keep" in span for span in spans) == 10


LATE = record("attempt", "attempt v2", "late", "r", 5, 500)


@cases(
    late_attempt=(ROUTE | {"sampled": True}, HOLD_S, LATE, 5, ["route r", "attempt v2"]),
    slow_first_step=(MODEL, 10, ROUTE | {"keep": SERVER}, 10, ["m", "route r"]),
)
def test_records_of_a_kept_trace_are_exported(first, expired_s, second, second_s, names):
    """Also one that comes late; the record of a first step waits for the route, however late that comes."""
    traces, spans = exporting()
    traces.add(encoded(first), 0)
    traces.expire(expired_s)
    traces.add(encoded(second), second_s)
    traces.expire(second_s + HOLD_S)

    assert [span["name"] for span in spans] == names


def test_memory_is_bounded():
    finished = []
    traces = TailSampler([].extend, [].extend, lambda records, is_kept: finished.append(records))
    for number in range(MAX_TRACES + 100):
        traces.add(encoded(ROUTE | {"trace": str(number)}), 0)

    assert len(traces) == MAX_TRACES
    assert len(finished) == 100


def test_damaged_record_does_not_end_the_collector(tmp_path):
    written, log = [], []
    traces = TailSampler(written.extend, lambda records: None)
    receiver = receiving(tmp_path / "s", traces, log.append)
    with receiver, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        for text in (b"nonsense", b'{"trace":1}', b"{}", b"\n", *encoded(ROUTE)):
            sender.sendto(text, str(tmp_path / "s"))
        wait_until(lambda: written, "a record")

    assert written == encoded(ROUTE)
    assert len(log) == 1
    assert traces.lost == 4


def test_file_of_records_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(collector, "MAX_FILE_BYTES", 10_000)
    path = tmp_path / "records.jsonl"
    for number in range(300):
        append_records(path, encoded(ROUTE | {"number": number}))

    numbers = [entry["number"] for entry in read_records(path)]
    assert numbers == list(range(numbers[0], 300))
    assert len(numbers) > 20
    assert {entry.name for entry in tmp_path.iterdir()} == {"records.jsonl", "records.jsonl.1"}
    assert path.stat().st_mode & 0o777 == 0o600
    assert sum(entry.stat().st_size for entry in tmp_path.iterdir()) < 22_000


def test_damaged_lines_are_left_out(tmp_path):
    path = tmp_path / "records.jsonl"
    (good,) = encoded(ROUTE)
    path.write_bytes(good[:50] + b"\n" + good + b"\n{}\n" + good + b"\n" + good[:9])

    assert len([*read_records(path)]) == 2
    assert [*read_records(tmp_path / "none")] == []


def test_retry_and_late_attempts_have_their_stage():
    route = ROUTE | {"inner": [part("attempt v2", 12, 40, span="x"), part("attempt v1", 41, 92, span="t")]}
    late = record("attempt", "attempt v1", "late", "r", 12, 500)

    (retried,) = lines(route, MODEL | {"begin": 45 * MS})
    (expired,) = lines(ROUTE | {"inner": []}, late, MODEL | {"parent": "late", "end": 480 * MS})

    assert (retried["stages_ms"]["retry"], retried["stages_ms"]["queue"]) == (28, 4)
    assert expired["stages_ms"] == {"route": 2, "model": 83}


def test_gateway_in_front_of_a_model_without_a_route():
    first, second = (MODEL | {"parent": "i", "span": str(n), "begin": (30 + n) * MS} for n in range(2))

    (line,) = lines(GATEWAY, first, second)

    assert {"receive", "admission", "network"} <= {*line["stages_ms"]}
    assert line["ms"] == 100


@cases(
    "records",
    a_route=(ROUTE | {"end": 104 * MS}, MODEL),
    an_ensemble=(
        MODEL | {"parent": "i", "end": 60 * MS, "inner": []},
        MODEL | {"parent": "i", "span": "n", "begin": 61 * MS, "end": 104 * MS, "inner": []},
    ),
)
def test_work_after_the_response_belongs_to_no_stage(records):
    """Otherwise the stages take longer than the request."""
    (line,) = lines(GATEWAY, *records)

    assert sum(line["stages_ms"].values()) <= line["ms"]


def test_images_of_a_batch_have_their_own_time():
    inner = [*GATEWAY["inner"], part("inference", 200, 299, span="j")]
    both = GATEWAY | {"end": 300 * MS, "inner": inner}

    log = lines(both, ROUTE, MODEL, ROUTE | {"span": "r2", "parent": "j", "inner": []})

    assert [line["ms"] < 110 for line in log] == [True, True]


def test_tracing_never_raises(caplog):
    @never_raises
    def fail(number: int) -> int:
        return number // 0

    assert [fail(1), fail(2)] == [None, None]
    assert len(caplog.records) == 1


class Note(Struct, frozen=True, omit_defaults=True):
    text: str
    number: int = 0


WATCHDOG_S = 60
NOTES = Note("a", 1), Note("b€"), Note("c" * 500, 3)


@pytest.fixture
def journal(tmp_path) -> Journal[Note]:
    return Journal(tmp_path / "notes.jsonl", Note, "nereid note")


@pytest.fixture
def written(journal) -> Journal[Note]:
    append(journal, *NOTES)
    return journal


def append(journal: Journal[Note], *notes: Note) -> None:
    with journal.locked() as add:
        for note in notes:
            add(note)


def flipped(line: bytes, position: int, bit: int) -> bytes:
    return line[:position] + bytes([line[position] ^ 1 << bit]) + line[position + 1 :]


def test_each_line_ends_with_the_checksum_of_its_object(journal):
    assert (journal.read(), journal.read_intact(), journal.note_on_damage()) == ((), (), "")

    append(journal, Note("a", 1))
    append(journal, Note("b€"))

    objects = b'{"text":"a","number":1}', '{"text":"b€"}'.encode()
    lines = [content[:-1] + f',"crc32":"{crc32(content):08x}"}}\n'.encode() for content in objects]
    assert journal.path.read_bytes() == b"".join(lines)
    assert journal.read() == (Note("a", 1), Note("b€"))


def test_earlier_releases_wrote_no_checksum(journal):
    journal.path.write_bytes(b'{"text":"a","added":[]}\n\n{"text":"b","number":2}\n')

    assert (journal.read(), journal.note_on_damage()) == ((Note("a"), Note("b", 2)), "")


@cases("torn", begin=b"{", string=b'{"text":"d', object=b'{"text":"d","of":{}', text=b'{"text":"\xe2')
def test_torn_last_line_is_left_out_and_ended_by_the_next_entry(written, torn):
    """A killed writer leaves the beginning of its line; it is no damage."""
    written.path.write_bytes(written.path.read_bytes() + torn)
    assert (written.read(), written.note_on_damage()) == (NOTES, "")

    append(written, Note("e"))

    assert written.read() == (*NOTES, Note("e"))
    assert written.path.read_bytes().splitlines()[3] == torn


@cases(
    "damage",
    bit=lambda line: flipped(line, 10, 0),
    bytes=lambda line: b"\xff\x00\n",
    cut=lambda line: line[5:],
    brace=lambda line: b'{"text":"b","of":{}\n',
    no_object=lambda line: b"[7]\n",
    deep=lambda line: b'{"text":' + b"[" * 100_000 + b"\n",
)
def test_damaged_line_is_named_and_costs_no_other(written, damage):
    lines = written.path.read_bytes().splitlines(keepends=True)
    written.path.write_bytes(b"".join([lines[0], damage(lines[1]), lines[2]]))

    assert written.read() == written.read_intact() == (NOTES[0], NOTES[2])
    note = f"note: damaged lines of '{written.path}' are ignored: 2; fix: remove them"
    assert written.note_on_damage() == note


def test_each_damaged_bit_of_the_last_line_is_found_or_harmless(written):
    """The last line decides what is unfinished: it is read as it was written, or an error names it."""
    *before, last = written.path.read_bytes().splitlines(keepends=True)
    message, refused = f"line 3 of '{written.path}' is damaged, so the last change may be incomplete", 0
    for position in range(len(last)):
        written.path.write_bytes(b"".join([*before, flipped(last, position, position % 8)]))
        try:
            assert written.note_on_damage() == ""
            assert written.read() == NOTES
        except OperationFailed as error:
            refused += str(error).startswith(message)

    # Only in the newline and around the checksum can a bit change without a loss.
    assert refused > len(last) * 0.9


@cases("line", value=b'{"text":7}\n', key=b'{"words":"a"}\n')
def test_line_of_another_release_is_an_error_with_its_number(written, line):
    written.path.write_bytes(written.path.read_bytes() + line)
    append(written, Note("e"))

    message = r"^cannot read line 4 of '.*': another release of nereid wrote it"
    with pytest.raises(OperationFailed, match=message):
        written.read()
    assert (written.read_intact(), written.note_on_damage()) == ((*NOTES, Note("e")), "")


def test_entry_is_on_the_disk_before_the_next(journal, monkeypatch):
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(journal.path.read_bytes().count(b"\n")))

    append(journal, *NOTES)

    assert synced == [1, 1, 2, 3]  # the folder, too, once the file is new


def test_entries_of_one_lock_are_not_mixed_with_others(journal):
    program = (
        "import sys; from tests.unit.test_traces import *\n"
        f"with Journal(Path({str(journal.path)!r}), Note, 'x').locked({WATCHDOG_S}) as add:\n"
        "    for number in range(40): add(Note(sys.argv[1] * 2000, number))"
    )
    words = [sys.executable, "-c", program]
    with subprocess.Popen([*words, "a"]) as first, subprocess.Popen([*words, "b"]) as second:
        assert (first.wait(WATCHDOG_S), second.wait(WATCHDOG_S)) == (0, 0)

    entries = journal.read()

    assert [entry.number for entry in entries] == [*range(40)] * 2
    assert len({entry.text for entry in entries[:40]}) == 1


def test_full_disk_loses_only_the_entry_that_does_not_fit(written):
    """A limit of the file's size stands for the disk: a part of the line is written, and then no more."""
    before, limits = written.path.stat().st_size, resource.getrlimit(resource.RLIMIT_FSIZE)
    with written.locked() as add:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before + 10, limits[1]))
        try:
            with pytest.raises(OSError, match="File too large") as failed:
                add(Note("does not fit"))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert (failed.value.filename, written.read()) == (str(written.path), NOTES)
        add(Note("fits"))

    assert written.read() == (*NOTES, Note("fits"))


@cases(
    link=(lambda path: path.symlink_to("/dev/null"), errno.ELOOP),
    folder=(Path.mkdir, errno.EISDIR),
    no_folder=(lambda path: path.parent.rmdir(), errno.ENOENT),
)
def test_file_that_cannot_be_written_is_named(make, code, journal):
    """A link would let others choose the file that is written."""
    make(journal.path)

    with pytest.raises(OSError, match=r"notes.jsonl") as failed:
        append(journal, Note("a"))

    assert failed.value.errno == code
