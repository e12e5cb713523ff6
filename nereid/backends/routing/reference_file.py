"""Reference files of routes: the distributions of signals that later traffic is compared with."""

import contextlib
import datetime
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from nereid.backends.routing import route_file
from nereid.backends.routing.assignment import MAX_VARIANTS, Name, Version
from nereid.base.errors import InvalidConfig

# How many of a route's best classes are counted by index.
TOP_CLASSES = 20
CLASS = "class"
Count = Annotated[int, Meta(ge=0)]


class Histogram(Struct, frozen=True, forbid_unknown_fields=True):
    """Counts of values by bucket: one more than the bounds, because the last bucket has no upper bound."""

    bounds: Annotated[tuple[float, ...], Meta(description="Upper bounds of the buckets, ascending.")]
    counts: Annotated[tuple[Count, ...], Meta(description="Images in each bucket.")]

    def __post_init__(self) -> None:
        if len(self.counts) != len(self.bounds) + 1:
            raise ValueError(f"expected {len(self.bounds) + 1} counts, got {len(self.counts)}")
        if list(self.bounds) != sorted(set(self.bounds)):
            raise ValueError(f"expected ascending bounds, got {list(self.bounds)}")


class VariantReference(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The reference of one variant; the versions are those of its model and of the network behind."""

    name: Name
    model: Annotated[str, Meta(min_length=1, description="The variant's model.")]
    version: Version
    network_version: Annotated[str, Meta(description="Version of the network, as in the metrics.")]
    images: Annotated[int, Meta(ge=0, description="Images of the reference.")]
    signals: Annotated[dict[str, Histogram], Meta(description="Histograms by the name of the signal.")]
    classes: Annotated[
        tuple[Count, ...],
        Meta(description="Images by best class, in the order of the route's `classes`; then all others."),
    ] = ()


class Reference(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Content of a reference file."""

    created: Annotated[datetime.datetime, Meta(tz=True, description="Time of the measurement.")]
    source: Annotated[str, Meta(description="Folder of the images, or the traffic.")]
    variants: Annotated[tuple[VariantReference, ...], Meta(min_length=1, max_length=MAX_VARIANTS)]
    classes: Annotated[
        tuple[Count, ...], Meta(max_length=TOP_CLASSES, description="The most frequent best classes.")
    ] = ()
    schema: Annotated[str, Meta(description="For editors.")] = msgspec.field(name="$schema", default="")

    def __post_init__(self) -> None:
        names = [variant.name for variant in self.variants]
        if len(set(names)) != len(names):
            raise ValueError(f"names of variants must differ, got {', '.join(names)}")
        for variant in self.variants:
            if variant.classes and len(variant.classes) != len(self.classes) + 1:
                raise ValueError(
                    f"variant '{variant.name}': expected {len(self.classes) + 1} counts of classes, "
                    f"got {len(variant.classes)}"
                )

    def variant(self, name: str) -> VariantReference | None:
        """Return the reference of a variant, or None."""
        return next((variant for variant in self.variants if variant.name == name), None)


def path_of(repository: Path, route: str) -> Path:
    """Return the path of a route's reference file, which Triton ignores."""
    return repository / f"{route}.reference.json"


def format_reference(reference: Reference) -> bytes:
    """Return the JSON of a reference file, one field per line."""
    return msgspec.json.format(msgspec.json.encode(reference), indent=1) + b"\n"


def read_reference(path: Path) -> Reference | None:
    """Read a reference file; None if there is none.

    Raises:
        InvalidConfig: it is not a reference, or cannot be read.
    """
    try:
        return msgspec.json.decode(route_file.read(path)[0], type=Reference)
    except FileNotFoundError:
        return None
    except InvalidConfig as error:
        raise InvalidConfig(f"reference {error}") from None
    except OSError as error:
        raise InvalidConfig(f"reference '{path}': {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"reference '{path}': {error}; fix: nereid drift baseline") from None


class ReferenceWatch:
    """The reference of a route, read again when its file changes; None without a valid file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reference: Reference | None = None
        self.problem = ""
        # When the current file was stored here, in Unix time; a file may be copied from elsewhere.
        self.stored = 0.0
        self._seen = 0, 0, 0

    @property
    def classes(self) -> frozenset[int] | None:
        """The classes that are counted by their index; None if no class is counted."""
        return frozenset(self.reference.classes) if self.reference and self.reference.classes else None

    def poll(self) -> bool:
        """Reread the file if it has changed since the last call, keeping any problem; return whether so."""
        now, modified_at = (0, 0, 0), 0.0
        with contextlib.suppress(OSError):
            status = self.path.stat()
            now, modified_at = (status.st_mtime_ns, status.st_size, status.st_ino), status.st_mtime
        if now == self._seen:
            return False
        self._seen, self.reference, self.problem = now, None, ""
        try:
            self.reference = read_reference(self.path)
            self.stored = max(self.reference.created.timestamp(), modified_at) if self.reference else 0.0
        except InvalidConfig as error:
            self.problem = str(error)
        return True
