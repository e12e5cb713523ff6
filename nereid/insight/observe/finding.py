"""The result of one check of `nereid doctor`."""

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "note", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check: `ok`, `note` (the server works anyway) or `fail`, the state found, and the fix."""

    what: str
    verdict: Verdict
    found: str
    fix: str = ""
