"""Checks of models of the backend `boxes`."""

from collections.abc import Iterator

from nereid.repository.check import Profile, Verdict
from nereid.tasks.detect.detector import ObjectFinder


def check(profile: Profile, model: str) -> Iterator[tuple[Verdict, str]]:
    """Yield the head of each version of a `boxes` model; raises InvalidConfig."""
    for version in profile.versions(model):
        head = ObjectFinder.from_config(profile.config(model, version)).head
        yield "ok", f"head {head.name}" + (f", {head.classes} classes" if head.classes else "")
