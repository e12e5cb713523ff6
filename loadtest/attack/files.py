"""Give changed networks and images to the code behind the commands: each is answered, or refused in one line.

What a command does in a process of its own happens in the worker here, which is faster. A case that ends or
holds its worker is tried again with the real processes, which must explain it.

    python -m loadtest.attack.files [--cases 20000] [--seed 1]
"""

import multiprocessing
import os
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import onnxruntime

from loadtest import record
from loadtest.attack.file_cases import ANSWERED, PARTS, REFUSED, Cases, prepare
from nereid.base.processes import available_cores
from nereid.models.publish import examination, examiner
from nereid.models.publish.examination import ExaminationFailed, ExaminationRequest, Rejected
from nereid.models.publish.importing import adaptation

CASE_S, REAL_CASE_S = 60.0, 200.0
MEMORY_BYTES = 8 * 2**30
ENDED = "its process was ended"
VERDICTS = (ANSWERED, REFUSED, ENDED, "wrong")
COLUMNS: record.Columns = {name: f"{{{name}}}" for name in ("command", "cases", *VERDICTS)}
Outcome = tuple[int, str, str]


class Worker(NamedTuple):
    """A process, what it sends, the cases that it does, and since when it does the present one."""

    process: Any
    results: Connection
    cases: list[int]
    since: list[float]


def examined(request: ExaminationRequest, progress: Callable[[str], None]) -> Any:
    """Examine a network in this process; as `examination._run`."""
    contents = dict[str, Any]()
    examiner.handle_request(
        request.to_json().decode(), lambda kind, content: contents.__setitem__(kind, content)
    )
    if "report" in contents:
        return contents["report"]
    raise Rejected(contents["rejected"]) if "rejected" in contents else ExaminationFailed(contents["failed"])


def tried(path: Path) -> adaptation.NetworkTrial | None:
    """Run a network in this process; as `try_network`."""
    try:
        return adaptation.run(path)
    except Exception:  # the process would have ended with it
        return None


def work(cases: Cases, numbers: list[int], results: Connection, is_real: bool) -> None:
    """Do cases one after the other; send each number before, and with its outcome after."""
    onnxruntime.set_default_logger_severity(4)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if not is_real:
        for module, name, replacement in (
            (examination, "_run", examined),
            (adaptation, "try_network", tried),
        ):
            setattr(module, name, replacement)
        examiner.WARM_RUNS, examiner.TIMED_RUNS, examiner.MIN_DURATION_S = 0, 1, 0.0
    for number in numbers:
        results.send((number, "", ""))
        case = cases.case(number)
        results.send((number, f"{case.command}: {case.name}", cases.outcome(case)))


def start(cases: Cases, numbers: list[int], is_real: bool) -> Worker:
    """Start a worker."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    context = multiprocessing.get_context("fork")
    process = context.Process(target=work, args=(cases, numbers, theirs, is_real))
    process.start()
    theirs.close()
    return Worker(process, ours, numbers, [time.monotonic()])


def outcomes(cases: Cases, numbers: list[int], workers: int, is_real: bool = False) -> Iterator[Outcome]:
    """Yield number, name and outcome of each case; a worker that ends or hangs is replaced."""
    limit_s = REAL_CASE_S if is_real else CASE_S
    present = [start(cases, numbers[index::workers], is_real) for index in range(workers)]
    while present:
        wait([worker.results for worker in present], timeout=1)
        for worker in [*present]:
            try:
                while worker.results.poll():
                    number, name, outcome = worker.results.recv()
                    worker.since[0] = time.monotonic()
                    if outcome:
                        yield number, name, outcome
                        worker.cases.remove(number)
                if time.monotonic() - worker.since[0] < limit_s:
                    continue
                failure = f"hung for {limit_s:g} s"
            except EOFError:
                worker.process.join()
                failure = f"ended with {worker.process.exitcode}"
            worker.process.kill()
            worker.process.join()
            present.remove(worker)
            if worker.cases:
                number, *left = worker.cases
                yield number, "", failure
                if left:
                    present.append(start(cases, left, is_real))


def main() -> int:
    """Do all cases, print and record."""
    parser = record.parser(__doc__ or "", cases=20_000, seed=1)
    parser.add_argument("--only", type=int, action="append", help="do this case in this process")
    parser.add_argument("--commands", nargs="+", default=[*PARTS], choices=PARTS, help="cases of these only")
    args = record.parsed(parser)
    start_s, counts, wrong = time.monotonic(), Counter[tuple[str, str]](), list[str]()
    with tempfile.TemporaryDirectory() as scratch:
        prepare(repository := Path(scratch) / "models")
        cases = Cases(args.seed, repository, args.commands)
        if args.only:
            for number in args.only:
                case = cases.case(number)
                print(number, case.command, case.name, cases.outcome(case))
            return 0
        again = list[int]()
        for number, name, outcome in outcomes(cases, [*range(args.cases)], available_cores()):
            if not name:
                print(f"{number}: {outcome}", file=sys.stderr)
                again.append(number)
                continue
            verdict = outcome if outcome in (ANSWERED, REFUSED) else "wrong"
            counts[name.partition(":")[0], verdict] += 1
            if verdict == "wrong":
                wrong.append(f"{number}: {name}: {outcome}")
                print(wrong[-1], file=sys.stderr)
        for number, _, outcome in outcomes(cases, again, 1, is_real=True):
            command = cases.case(number).command
            is_explained = outcome in (ANSWERED, REFUSED)
            counts[command, ENDED if is_explained else "wrong"] += 1
            if not is_explained:
                wrong.append(f"{number}: {cases.case(number)[:2]}: {outcome}")
                print(wrong[-1], file=sys.stderr)
    rows = []
    for command in args.commands:
        verdicts = {verdict: counts[command, verdict] for verdict in VERDICTS}
        rows.append({"command": command, "cases": sum(verdicts.values()), **verdicts})
    print(record.table(COLUMNS, rows), f"{time.monotonic() - start_s:.0f} s")
    missed = [f"{len(wrong)} cases were neither answered nor refused in a clear line"] if wrong else []
    return record.finish(args.record, {"seed": args.seed, "cases": args.cases, "rows": rows}, missed)


if __name__ == "__main__":
    record.end(main)
