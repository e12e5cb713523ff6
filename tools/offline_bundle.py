"""Bundle for machines without a network, built by `make offline`: wheels in parts, sums, the installer."""

import argparse
import io
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from pip._vendor.packaging.requirements import Requirement

from nereid.base.assets import CHECKOUT
from nereid.base.errors import OperationFailed, WrongUsage
from nereid.base.units import format_bytes
from nereid.repository import checksums
from tools.wheel_closure import Wheel, brackets, close, read_wheel, read_wheels, target_environment

INSTALLER = CHECKOUT / "deploy" / "install-offline.sh"
CONSTRAINTS = CHECKOUT / "deploy" / "constraints.txt"
SUMS = "SHA256SUMS"
PYTHONS = ("3.11", "3.12")
# The newest glibc 2.x that a wheel may need. Source: the tag of nvidia-pytriton 0.7.0; Debian 12 has 2.36.
MAX_GLIBC = 35
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}
MIN_PART_BYTES = 2**20
MAX_PARTS = 999  # so that names sort in the order of the parts
EXCLUSIVE = {"cpu", "gpu", "gpu13"}
# A pass adds requirements that only the target has. Two are typical; more mean that pip makes no progress.
MAX_PASSES = 5


class Parts:
    """A stream that is written as files of a limited size."""

    def __init__(self, stem: Path, part_bytes: int) -> None:
        self.paths: list[Path] = []
        self._stem, self._part_bytes = stem, part_bytes
        self._file: io.BufferedWriter | None = None
        self._room = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._file:
            self._file.close()

    def write(self, data: bytes) -> int:
        """Append to the stream; starts the next part where the current one is full."""
        rest = memoryview(data)
        while rest:
            if not self._room:
                self._open_next()
            assert self._file
            written = self._file.write(rest[: self._room])
            self._room -= written
            rest = rest[written:]
        return len(data)

    def _open_next(self) -> None:
        if self._file:
            self._file.close()
        if len(self.paths) == MAX_PARTS:
            size = format_bytes(self._part_bytes)
            raise OperationFailed(
                f"cannot split the bundle: expected at most {MAX_PARTS} parts, got more of {size}",
                "make offline PART=100M",
            )
        self.paths.append(self._stem.with_name(f"{self._stem.name}.{len(self.paths) + 1:03}"))
        self._file = self.paths[-1].open("wb")
        self._room = self._part_bytes


def parse_size(text: str) -> int:
    """Return the bytes of a size such as 512K, 60M or 2G.

    Raises:
        WrongUsage: the text is not a size, or the size is below one mebibyte.
    """
    match = re.fullmatch(r"(\d{1,9})([KMG]?)", text, re.ASCII)
    size = int(match[1]) * UNITS.get(match[2], 1) if match else 0
    if size < MIN_PART_BYTES:
        raise WrongUsage(
            f"invalid size of a part: expected at least 1M, got '{text}'", "make offline PART=60M"
        )
    return size


def parse_python(text: str) -> str:
    """Return the version in `3.12` or `python3.12`.

    Raises:
        WrongUsage: Nereid does not support the version.
    """
    version = Path(text).name.removeprefix("python")
    if version not in PYTHONS:
        expected = " or ".join(PYTHONS)
        raise WrongUsage(
            f"unsupported Python of the target: expected {expected}, got '{text}'",
            f"make offline PYTHON={PYTHONS[-1]}",
        )
    return version


def parse_extras(text: str, known: frozenset[str]) -> tuple[str, ...]:
    """Return the extras of a comma-separated list.

    Raises:
        WrongUsage: an extra does not exist, or two of them exclude each other.
    """
    extras = tuple(dict.fromkeys(extra.strip() for extra in text.split(",") if extra.strip()))
    if unknown := sorted({*extras} - known):
        raise WrongUsage(
            f"unknown extras: expected some of {', '.join(sorted(known))}, got {', '.join(unknown)}",
            "make offline EXTRAS=embedded,cpu",
        )
    if len(runtimes := sorted({*extras} & EXCLUSIVE)) > 1:
        raise WrongUsage(
            f"extras exclude each other: expected one of cpu, gpu and gpu13, got {' and '.join(runtimes)}",
            f"make offline EXTRAS={runtimes[0]}",
        )
    return extras


def run_pip(*words: str | Path) -> None:
    """Run the pip of this interpreter with its own configuration.

    Raises:
        OperationFailed: pip ended with an error.
    """
    # Errors only: with warnings, each index that lacks a package has a line.
    command = [sys.executable, "-m", "pip", words[0], "-qq", "--disable-pip-version-check", "--no-input"]
    done = subprocess.run([*map(str, command), *map(str, words[1:])], stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise OperationFailed(f"pip {words[0]} failed with code {done.returncode}:\n{done.stderr.strip()}")


def build_own_wheel(folder: Path) -> Wheel:
    """Build the wheel of the checkout into a folder."""
    run_pip("wheel", "--no-deps", "--wheel-dir", folder, CHECKOUT)
    (path,) = folder.glob("nereid_serving-*.whl")
    return read_wheel(path)


def download(requirements: Sequence[str], python: str, folder: Path) -> None:
    """Download the wheels of the requirements, and of all that they require, for a target."""
    tags = [*(f"manylinux_2_{minor}" for minor in range(5, MAX_GLIBC + 1))]
    tags += ["manylinux1", "manylinux2010", "manylinux2014"]
    platforms = [word for tag in tags for word in ("--platform", f"{tag}_x86_64")]
    target = ["--only-binary", ":all:", "--implementation", "cp", "--python-version", python, *platforms]
    run_pip("download", *target, "--constraint", CONSTRAINTS, "--dest", folder, *requirements)


def collect(
    own_wheel: Wheel,
    extras: Sequence[str],
    python: str,
    folder: Path,
    download: Callable[[Sequence[str], str, Path], None] = download,
) -> dict[str, Wheel]:
    """Download exactly the wheels that a target with this Python needs.

    pip chooses by the environment markers of the Python that runs it. Requirements that only the target has
    are added in further passes, and wheels without a use on the target are left out.

    Raises:
        OperationFailed: a package is missing, or has no wheel for the target.
    """
    requested = [Requirement(f"{own_wheel.name}{brackets(extras)}"), Requirement("pip")]
    missing: tuple[str, ...] = ()
    for number in range(MAX_PASSES):
        download(
            [f"{own_wheel.path}{brackets(extras)}", "pip", *missing], python, into := folder / f"pass{number}"
        )
        wheels = read_wheels(into)
        closure = close(wheels, requested, target_environment(python))
        if not closure.missing:
            return {name: wheels[name] for name in sorted(closure.needed)}
        missing = tuple(dict.fromkeys((*missing, *closure.missing)))
    raise OperationFailed(f"incomplete bundle: expected wheels for {', '.join(closure.missing)}, got none")


def bundle_name(own_wheel: Wheel, python: str, wheels: Sequence[Wheel]) -> str:
    """Return the name of the bundle with the tags of its target, which the installer compares."""
    glibc = max([5, *(wheel.glibc for wheel in wheels)])
    return f"nereid-offline-{own_wheel.version}-cp{python.replace('.', '')}-manylinux_2_{glibc}_x86_64"


def write_bundle(
    name: str, wheels: Sequence[Path], requirements: str, folder: Path, part_bytes: int
) -> list[Path]:
    """Write the parts, their sums and the installer; returns the parts.

    The same wheels give the same bytes.
    """
    for old in (*folder.glob("nereid-offline-*.tar.*"), folder / SUMS):
        old.unlink(missing_ok=True)
    with (
        Parts(folder / f"{name}.tar", part_bytes) as parts,
        tarfile.open(fileobj=parts, mode="w|") as archive,
    ):
        _add(archive, "requirements.txt", io.BytesIO(requirements.encode()), len(requirements.encode()))
        for wheel in sorted(wheels):
            with wheel.open("rb") as content:
                _add(archive, wheel.name, content, wheel.stat().st_size)
    shutil.copy(INSTALLER, folder)
    (folder / SUMS).write_text("".join(f"{checksums.digest(path)}  {path.name}\n" for path in parts.paths))
    return parts.paths


def _add(archive: tarfile.TarFile, name: str, content: io.BufferedIOBase, size: int) -> None:
    member = tarfile.TarInfo(name)
    member.size = size
    archive.addfile(member, content)


def build(extras: str, python: str, part_bytes: int, folder: Path) -> None:
    """Build a bundle in a folder, in place of the one that is there."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".wheels-") as work:
        print("building the wheel of the checkout …", flush=True)
        own_wheel = build_own_wheel(Path(work))
        chosen = parse_extras(extras, own_wheel.extras)
        print(f"downloading wheels for Python {python}, extras {','.join(chosen) or 'none'} …", flush=True)
        wheels = collect(own_wheel, chosen, python, Path(work))
        requirements = (
            f"{own_wheel.name}{brackets(chosen)}=={own_wheel.version}\npip=={wheels['pip'].version}\n"
        )
        name = bundle_name(own_wheel, python, [*wheels.values()])
        parts = write_bundle(name, [file.path for file in wheels.values()], requirements, folder, part_bytes)
    size = format_bytes(sum(path.stat().st_size for path in parts))
    print(f"{len(wheels)} packages, {size} in {len(parts)} parts: {folder}")
    print(f"on the target: sh install-offline.sh {name}.tar.*")


def main(arguments: Sequence[str]) -> int:
    """Build a bundle as the command line says; returns the exit code."""
    this = f"{sys.version_info.major}.{sys.version_info.minor}"
    parser = argparse.ArgumentParser(prog="python -m tools.offline_bundle", description=__doc__)
    parser.add_argument("--extras", default="embedded,cpu,text,publish,gateway", help="extras of the project")
    parser.add_argument("--python", default=this, help="Python of the target (default: %(default)s)")
    parser.add_argument("--part", default="100M", help="largest size of a part (default: %(default)s)")
    parser.add_argument(
        "--out", type=Path, default=CHECKOUT / "dist" / "offline", help="folder of the bundle"
    )
    options = parser.parse_args(arguments)
    try:
        build(options.extras, parse_python(options.python), parse_size(options.part), options.out)
    except OperationFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, WrongUsage) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
