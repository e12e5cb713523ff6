"""How the versions of a model are printed."""

from collections.abc import Sequence

from nereid.cli.route_view import print_table
from nereid.publish.versions import VersionState
from nereid.routes.target import percent

COLUMNS = ("version", "state", "traffic", "pinned as", "size", "SHA-256", "published", "from")


def print_versions(versions: Sequence[VersionState]) -> None:
    """Print a row per version."""
    print_table(
        *COLUMNS,
        rows=[
            (
                str(each.version),
                each.state,
                "\n".join(f"{route} {percent(share)}" for route, share in each.shares.items()),
                ", ".join(each.pinned),
                f"{each.size_bytes / 1e6:.1f} MB",
                each.sha256[:12],
                each.published,
                each.source,
            )
            for each in versions
        ],
    )
