"""`nereid check` and `nereid doctor`: check a model repository, and the machine."""

import json
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Annotated

import typer

from nereid.application.chosen_models import find_any_model
from nereid.base.assets import REPOSITORY
from nereid.base.errors import OperationFailed
from nereid.cli.options import DEFAULT_REPOSITORY, AsJson, Repository, complete_model, environment
from nereid.cli.tables import print_table

# Keys of a finding in the JSON of `nereid doctor`; scripts depend on them.
KEYS = ("what", "verdict", "found", "fix")


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
    model: Annotated[
        str,
        typer.Option(
            help="Show only this model's findings.", show_default="all models", autocompletion=complete_model
        ),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Check a model repository without a server: configs, networks, ensembles, labels, routes, checksums.

    The table lists notes, and failures that would stop a server or make its answers wrong. All profiles are
    checked. With --json, the checks that passed are also listed.
    """
    from nereid.models.routes.location import check_repository
    from nereid.repository import check as repository_check

    check_repository(repository)
    if model:
        find_any_model(repository, model)
    findings = [finding for finding in repository_check.check(repository) if model in ("", finding.model)]
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        rows = [
            (finding.verdict, finding.model, finding.what, finding.found, finding.fix)
            for finding in findings
            if finding.verdict != "ok"
        ]
        if rows:
            print_table("", "model", "check", "found", "fix", rows=rows)
        print(repository_check.summarize(repository, findings, model))
    failures = [finding for finding in findings if finding.verdict == "fail"]
    if failures:
        first = f"{failures[0].model}, {failures[0].what}: {failures[0].found}"
        raise OperationFailed(f"{len(failures)} failure{'s' if failures[1:] else ''}, the first: {first}")


def doctor(context: typer.Context, as_json: AsJson = False, repository: Repository = REPOSITORY) -> None:
    """Check that this machine has everything the embedded server needs; each failure names its fix."""
    from nereid.insight.observe.doctor import diagnose

    findings = list(diagnose(environment(context), repository))
    if as_json:
        print(json.dumps([dict(zip(KEYS, astuple(finding), strict=True)) for finding in findings], indent=2))
    else:
        rows = [(finding.status, finding.check, finding.detail, finding.fix) for finding in findings]
        print_table("", "check", "found", "fix", rows=rows)
    failed = [finding.check for finding in findings if finding.status == "fail"]
    if failed:
        raise OperationFailed(f"this machine is not ready to serve: {', '.join(failed)}")
