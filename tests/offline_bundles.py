"""Tiny wheels and bundles, so that an installation without a network takes seconds."""

import importlib.metadata
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools import offline_bundle

THIS = f"{sys.version_info.major}.{sys.version_info.minor}"
TAG = f"cp{THIS.replace('.', '')}"
PART_BYTES = 2**20
COMMAND = """from leaf import VERSION
def main(): print("nereid 0.1.0 with leaf", VERSION)
"""


def write_wheel(
    folder: Path,
    name: str,
    version: str,
    metadata: Sequence[str] = (),
    files: Mapping[str, str] | None = None,
) -> Path:
    stem = f"{name.replace('-', '_')}-{version}"
    head = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *metadata]
    members = {
        f"{stem}.dist-info/METADATA": "\n".join([*head, ""]),
        f"{stem}.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{stem}.dist-info/RECORD": "",
        **(files or {}),
    }
    with zipfile.ZipFile(path := folder / f"{stem}-py3-none-any.whl", "w") as archive:
        for member, content in members.items():
            archive.writestr(member, content)
    return path


def write_leaf(folder: Path, version: str) -> Path:
    return write_wheel(folder, "leaf", version, files={"leaf.py": f"VERSION = '{version}'\n"})


def write_own(folder: Path, requirement: str = "leaf") -> Path:
    entry_points = "[console_scripts]\nnereid = nereid_stand_in:main\n"
    files = {"nereid_serving-0.1.0.dist-info/entry_points.txt": entry_points, "nereid_stand_in.py": COMMAND}
    return write_wheel(folder, "nereid-serving", "0.1.0", [f"Requires-Dist: {requirement}"], files)


def write_pip(folder: Path) -> Path:
    pip = importlib.metadata.distribution("pip")
    path = folder / f"pip-{pip.version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file in pip.files or []:
            if file.parts[0] in {"pip", f"pip-{pip.version}.dist-info"} and file.suffix != ".pyc":
                archive.write(str(file.locate()), str(file))
    return path


def parts_of(bundle: Path) -> list[Path]:
    return sorted(bundle.glob("nereid-offline-*"))


def write_bundle(folder: Path, wheels: Sequence[Path], tags: str = f"{TAG}-manylinux_2_17_x86_64") -> Path:
    (version,) = (path.name.split("-")[1] for path in wheels if path.name.startswith("pip-"))
    requirements = f"nereid-serving==0.1.0\npip=={version}\n"
    folder.mkdir(parents=True)
    offline_bundle.write_bundle(f"nereid-offline-0.1.0-{tags}", wheels, requirements, folder, PART_BYTES)
    return folder
