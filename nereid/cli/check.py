"""`nereid check`: check a model repository without a server."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from nereid.assets import REPOSITORY
from nereid.cli.options import DEFAULT_REPOSITORY, AsJson
from nereid.cli.tables import print_table
from nereid.errors import OperationFailed, WrongUsage


def check(
    repository: Annotated[
        Path,
        typer.Argument(
            help="Model repository.",
            metavar="REPOSITORY",
            envvar="NEREID_REPOSITORY",
            show_default=DEFAULT_REPOSITORY,
        ),
    ] = REPOSITORY,
    as_json: AsJson = False,
) -> None:
    """Check a model repository without a server: configs, networks, ensembles, labels, routes, checksums.

    The table shows failures, which make a server fail or answer wrongly, and notes. All profiles are
    checked. With --json, checks that passed are listed, too.
    """
    from nereid.repository import check as examination

    if not repository.is_dir():
        raise WrongUsage(f"'{repository}' is not a folder; fix: name a model repository, or nereid init DIR")
    findings = examination.check(repository)
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        rows = [
            (each.verdict, each.model, each.what, each.found, each.fix)
            for each in findings
            if each.verdict != "ok"
        ]
        if rows:
            print_table("", "model", "check", "found", "fix", rows=rows)
        print(examination.count(repository, findings))
    failures = [finding for finding in findings if finding.verdict == "fail"]
    if failures:
        first = f"{failures[0].model}, {failures[0].what}: {failures[0].found}"
        raise OperationFailed(f"{len(failures)} failure{'s' if failures[1:] else ''}, the first: {first}")
