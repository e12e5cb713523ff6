"""`python -m loadtest.bench`: the benchmark's command line."""

import os
from typing import Annotated

import typer

from loadtest.bench import runner
from loadtest.bench.plan import select
from nereid.cli.options import FAILED, fail, reporting
from nereid.errors import WrongUsage


def bench(
    rounds: Annotated[int, typer.Option(help="Rounds; each measures everything once.", min=1)] = 7,
    seconds: Annotated[float, typer.Option(help="Seconds of each measurement.", min=1)] = 2.0,
    paths: Annotated[
        str | None, typer.Option(help="Of cpu, ensemble, route, gateway, network.", show_default="all")
    ] = None,
    photos: Annotated[str | None, typer.Option(help="Of small, 1080p.", show_default="both")] = None,
    precisions: Annotated[str | None, typer.Option(help="Of fp32, int8.", show_default="as judged")] = None,
    concurrency: Annotated[
        str | None, typer.Option(help="Requests in flight at once.", show_default="32,8,1")
    ] = None,
    protocols: Annotated[
        str | None, typer.Option(help="Of http (wrk), grpc (perf_analyzer).", show_default="as judged")
    ] = None,
    with_pieces: Annotated[
        bool, typer.Option("--pieces/--no-pieces", help="Also the library's parts, and cold starts.")
    ] = True,
    record: Annotated[str, typer.Option(help="Store the result as loadtest/results/NAME.json.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="The result as JSON.")] = False,
) -> None:
    """Measure what serving costs against the same work in process; needs `wrk`.

    Lists take commas. What is not chosen is measured as far as a target asks for it: INT8 and gRPC on `cpu`
    at saturation, route and gateway with the small photo. The plan is printed first; a missed target makes
    the exit code 1.
    """
    with reporting():
        try:
            selection = select(paths, photos, precisions, concurrency, protocols)
        except ValueError as error:
            raise WrongUsage(str(error)) from None
        options = runner.Options(selection, rounds, seconds, with_pieces, record, as_json)
        if not runner.bench(options, os.environ):
            fail("a target was missed", FAILED)


if __name__ == "__main__":
    typer.run(bench)
