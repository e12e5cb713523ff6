"""Wheels in a folder: their requirements on a target machine, and the target's need of each of them."""

import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path

# pip's own copy: the tool runs with any Python that has pip.
from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name

# glibc's minor version of the tags that name a year instead. Source: PEP 600.
YEARS = {"manylinux1": 5, "manylinux2010": 12, "manylinux2014": 17}


@dataclass(frozen=True, slots=True)
class Wheel:
    """A built package, with the requirements and extras in its metadata."""

    path: Path
    name: str
    version: str
    requirements: tuple[Requirement, ...]
    extras: frozenset[str]

    @property
    def glibc(self) -> int:
        """The minor version of the oldest glibc that the wheel supports; 0 for pure Python."""
        tags = self.path.stem.rpartition("-")[2].split(".")
        return min(YEARS.get(tag.removesuffix("_x86_64"), _glibc_of(tag)) for tag in tags)


@dataclass(frozen=True, slots=True)
class Closure:
    """The names that a target needs, and the requirements that no wheel meets."""

    needed: frozenset[str]
    missing: tuple[str, ...]


def read_wheel(path: Path) -> Wheel:
    """Read the metadata of a wheel."""
    with zipfile.ZipFile(path) as archive:
        (member,) = (name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
        metadata = HeaderParser().parsestr(archive.read(member).decode())
    return Wheel(
        path,
        canonicalize_name(metadata["Name"]),
        metadata["Version"],
        tuple(map(Requirement, metadata.get_all("Requires-Dist", []))),
        frozenset(metadata.get_all("Provides-Extra", [])),
    )


def read_wheels(folder: Path) -> dict[str, Wheel]:
    """Read every wheel of a folder, by normalised name."""
    return {wheel.name: wheel for wheel in map(read_wheel, sorted(folder.glob("*.whl")))}


def target_environment(python: str) -> dict[str, str]:
    """Return the values of the environment markers for CPython `python` on Linux x86_64."""
    return {
        "implementation_name": "cpython",
        "implementation_version": f"{python}.0",
        "os_name": "posix",
        "platform_machine": "x86_64",
        "platform_python_implementation": "CPython",
        "platform_system": "Linux",
        "python_full_version": f"{python}.0",
        "python_version": python,
        "sys_platform": "linux",
    }


def close(
    wheels: Mapping[str, Wheel], requested: Iterable[Requirement], environment: Mapping[str, str]
) -> Closure:
    """Follow the requirements of `requested` through the wheels, as a target with `environment` will."""
    waiting, seen, needed, missing = list(requested), set(), set(), []
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        wheel = wheels.get(name)
        if wheel is None or not requirement.specifier.contains(wheel.version, prereleases=True):
            missing.append(_without_marker(requirement))
            continue
        needed.add(name)
        for extra in {"", *requirement.extras}:
            if (name, extra) not in seen:
                seen.add((name, extra))
                waiting += _required(wheel, {**environment, "extra": extra})
    return Closure(frozenset(needed), tuple(sorted({*missing})))


def _required(wheel: Wheel, environment: Mapping[str, str]) -> Iterator[Requirement]:
    for requirement in wheel.requirements:
        if requirement.marker is None or requirement.marker.evaluate(dict(environment)):
            yield requirement


def _without_marker(requirement: Requirement) -> str:
    return f"{requirement.name}{brackets(sorted(requirement.extras))}{requirement.specifier}"


def brackets(extras: Sequence[str]) -> str:
    """Return extras as they follow the name of a package."""
    return f"[{','.join(extras)}]" if extras else ""


def _glibc_of(tag: str) -> int:
    match = re.fullmatch(r"manylinux_2_(\d+)_x86_64", tag)
    return int(match[1]) if match else 0
