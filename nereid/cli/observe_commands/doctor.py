"""`nereid doctor`: check the machine."""

import typer

from nereid.base.assets import REPOSITORY
from nereid.base.errors import OperationFailed
from nereid.cli.options import AsJson, Repository, environment
from nereid.cli.tables import print_json, print_table


def doctor(context: typer.Context, as_json: AsJson = False, repository: Repository = REPOSITORY) -> None:
    """Check that this machine has everything the embedded server needs; each failure names its fix."""
    from nereid.insight.observe.doctor import examine

    findings = list(examine(environment(context), repository))
    if as_json:
        print_json(findings)
    else:
        rows = [(each.verdict, each.what, each.found, each.fix) for each in findings]
        print_table("", "check", "found", "fix", rows=rows)
    failed = [finding.what for finding in findings if finding.verdict == "fail"]
    if failed:
        raise OperationFailed(f"this machine is not ready to serve: {', '.join(failed)}")
