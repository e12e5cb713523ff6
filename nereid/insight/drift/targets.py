"""The routes of a repository as the drift monitor compares them."""

from pathlib import Path

from nereid.insight.drift.comparison import Target
from nereid.models.routes.target import RouteLocation, present_table, read_state
from nereid.repository.layout import pins, readable_configs
from nereid.server.command_line import PLAIN_PROFILE


def targets_of(location: RouteLocation, profile: str) -> list[Target]:
    """Return the variants of a route, in a profile of the server.

    In a profile with `fused` models, the pinned model measures the images, else its preprocessing model.

    Raises:
        OperationFailed, InvalidConfig: the route file is missing or invalid.
        OSError: it cannot be read.
    """
    table = present_table(location, read_state(location))
    measured = _measured(location.repository, profile)
    return [
        Target(
            each.name,
            each.model,
            each.version,
            table.network_versions[each.name],
            *_place(measured.get(each.model), each.version),
        )
        for each in table.route.variants
    ]


def _measured(repository: Path, profile: str) -> dict[str, tuple[str, int]]:
    """Return the model and version that measure a pinned model's images; version 0 for its own."""
    plain = "" if profile == PLAIN_PROFILE else profile
    documents = readable_configs(repository, plain)
    found = {}
    for pin in pins(repository, documents):
        is_fused = documents[pin.model].get("backend") == "fused"
        found[pin.model] = (pin.model, 0) if is_fused else (pin.preprocess, pin.preprocess_version)
    return found


def _place(measured: tuple[str, int] | None, version: int) -> tuple[str, int]:
    model, its_version = measured or ("", 0)
    return model, its_version or version
