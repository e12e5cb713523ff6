"""`nereid doctor`: check the machine."""

import json
from dataclasses import astuple

import typer

from nereid.base.assets import REPOSITORY
from nereid.base.errors import OperationFailed
from nereid.cli.options import AsJson, Repository, environment
from nereid.cli.tables import print_table

# Scripts depend on these keys.
KEYS = ("what", "verdict", "found", "fix")


def doctor(context: typer.Context, as_json: AsJson = False, repository: Repository = REPOSITORY) -> None:
    """Check that this machine has everything the embedded server needs; each failure names its fix."""
    from nereid.insight.observe.doctor import examine

    findings = list(examine(environment(context), repository))
    if as_json:
        print(json.dumps([dict(zip(KEYS, astuple(finding), strict=True)) for finding in findings], indent=2))
    else:
        rows = [(finding.status, finding.check, finding.detail, finding.fix) for finding in findings]
        print_table("", "check", "found", "fix", rows=rows)
    failed = [finding.check for finding in findings if finding.status == "fail"]
    if failed:
        raise OperationFailed(f"this machine is not ready to serve: {', '.join(failed)}")
