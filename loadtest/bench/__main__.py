"""The command line of the benchmark, `python -m loadtest.bench`."""

import json
import os
from typing import Annotated

import typer

from loadtest import record as records
from loadtest import wrk
from loadtest.bench import runner
from loadtest.bench.plan import select
from nereid.application.exit_codes import exiting
from nereid.base.errors import OperationFailed, WrongUsage


def bench(
    rounds: Annotated[int, typer.Option(help="Number of rounds; each measures everything once.", min=1)] = 7,
    seconds: Annotated[float, typer.Option(help="Duration of each measurement in seconds.", min=1)] = 2.0,
    paths: Annotated[
        str | None,
        typer.Option(help="Some of cpu, ensemble, by-hand, route, gateway, network.", show_default="all"),
    ] = None,
    photos: Annotated[str | None, typer.Option(help="Some of small, 1080p.", show_default="both")] = None,
    concurrency: Annotated[
        str | None, typer.Option(help="Numbers of requests in flight.", show_default="32,8,1")
    ] = None,
    record: Annotated[str, typer.Option(help="Store the result as loadtest/results/NAME.json.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Measure the cost of serving, compared with the same work in process; needs `wrk`.

    Lists take commas. INT8 is measured on `cpu` with 32 requests in flight, and route and gateway
    with the small photo. The exit code is 1 if a target is missed.
    """
    with exiting():
        try:
            cells = select(paths, photos, concurrency)
        except ValueError as error:
            raise WrongUsage(str(error)) from None
        if not wrk.is_installed():
            raise OperationFailed(wrk.MISSING)
        run = records.begin(record)
        result = runner.bench(cells, rounds, seconds, os.environ)
        run.write(result)
        if as_json:
            print(json.dumps({**run.header, **result}, indent=2))
        else:
            runner.show(result)
        if not all(target["met"] for target in result["targets"]):
            raise OperationFailed("the benchmark missed a target; see above")


if __name__ == "__main__":
    typer.run(bench)
