"""Installation without a network: of a bundle of `make offline`, and of tiny wheels for each error."""

import os
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.commands import captured
from tests.conftest import ROOT
from tests.offline_bundles import TAG, THIS, parts_of, write_bundle, write_leaf, write_own, write_pip
from tests.routes import wait_until
from tests.tables import cases

# Each of them starts Python several times.
pytestmark = pytest.mark.nightly(minutes=4)

BUILD_S, INSTALL_S = 600, 180
INSTALLER = ROOT / "deploy" / "install-offline.sh"
# What the script may use besides Python. All are in coreutils, except the shell.
PROGRAMS = ("sh", "cat", "dirname", "ls", "mkdir", "rm", "sha256sum")
# Settings that would lead pip to an index, or away from the environment.
PIP_SETTINGS = {"PIP_NO_INDEX": "1", "PIP_INDEX_URL": "http://127.0.0.1:9/simple"}
PIP_SETTINGS |= {"PIP_REQUIRE_VIRTUALENV": "0", "PIP_TARGET": "elsewhere", "PIP_CONFIG_FILE": "pip.conf"}
PIP_CONF = "[install]\nuser = true\nconstraint = absent.txt\n"


@pytest.fixture
def target(tmp_path):
    (programs := tmp_path / "programs").mkdir()
    for name in PROGRAMS:
        (programs / name).symlink_to(shutil.which(name))
    (programs / f"python{THIS}").symlink_to(sys.executable)
    (tmp_path / "pip.conf").write_text(PIP_CONF)
    return tmp_path


def install(target: Path, *words: str | Path, **variables: str) -> subprocess.CompletedProcess:
    """Run the script on the machine; without a network if this test may take it away."""
    command = [*(("unshare", "--net") if os.geteuid() == 0 else ()), "sh", INSTALLER, *words]
    command[0] = shutil.which(command[0])
    environment = {"PATH": str(target / "programs"), "HOME": str(target), **PIP_SETTINGS, **variables}
    return captured([*map(str, command)], cwd=target, env=environment, timeout=INSTALL_S)


def version(environment: Path) -> str:
    command = [environment / "bin" / "nereid", "--version"]
    return captured(command, timeout=INSTALL_S).stdout.strip()


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheels")
    return [write_own(folder), write_leaf(folder, "2.0"), write_pip(folder)]


@pytest.fixture(scope="module")
def original(wheels, tmp_path_factory):
    bundle = write_bundle(tmp_path_factory.mktemp("original") / "bundle", wheels)
    assert len(parts_of(bundle)) > 1
    return bundle


@pytest.fixture
def bundle(original, tmp_path):
    return shutil.copytree(original, tmp_path / "a stick" / "bundle")


def expect_error(done: subprocess.CompletedProcess, target: Path, *passages: str, code: int = 1) -> None:
    errors = done.stderr.splitlines()
    assert (done.returncode, done.stdout.count("installed")) == (code, 0), done.stderr
    assert [passage for passage in passages if passage not in done.stderr] == [], done.stderr
    assert sum(line.startswith("error: ") for line in errors) == 1, done.stderr
    assert not (target / "nereid").exists()


def test_bundle_is_installed_once_without_an_index(original, target):
    """Parts in any order become an environment with the command, which is never replaced."""
    done = install(target, *reversed(parts_of(original)))

    assert done.returncode == 0, done.stderr
    assert "3 packages in the bundle" in done.stdout
    assert "installed nereid 0.1.0 with leaf 2.0 in" in done.stdout
    assert not (target / "nereid" / ".incomplete").exists()
    assert not (target / "elsewhere").exists()
    again = install(target, *parts_of(original))
    assert (again.returncode, "is in use" in again.stderr) == (1, True)
    assert version(target / "nereid") == "nereid 0.1.0 with leaf 2.0"


@pytest.fixture
def system(target):
    """Another installation of Python on the machine, which has a package of the bundle in another version."""
    base, home = Path(sys.base_prefix), target / "system"
    python, library = home / "bin" / f"python{THIS}", home / "lib" / f"python{THIS}"
    python.parent.mkdir(parents=True)
    library.mkdir(parents=True)
    # A link would lead to the packages of the original.
    shutil.copy2(Path(sys.executable).resolve(), python)
    for path in (*(base / "lib" / library.name).iterdir(), *(base / "lib").glob("libpython*.so*")):
        if path.name not in {"site-packages", "dist-packages"}:
            (library.parent if ".so" in path.suffixes else library).joinpath(path.name).symlink_to(path)
    code = "import site; print(site.getsitepackages()[0])"
    asked = captured([python, "-I", "-c", code], check=True)
    (packages := Path(asked.stdout.strip())).mkdir(parents=True)
    assert packages.is_relative_to(home)
    with zipfile.ZipFile(write_leaf(target, "1.5")) as wheel:
        wheel.extractall(packages)
    return python


@cases(
    own=([], "leaf", "2.0"),
    system=(["--system-site-packages"], "leaf", "1.5"),
    system_too_old=(["--system-site-packages"], "leaf>=2", "2.0"),
)
def test_packages_of_the_machine_are_used_if_they_fit(
    options, requirement, leaf, wheels, target, system, tmp_path
):
    (folder := tmp_path / "own").mkdir()
    bundle = write_bundle(tmp_path / "bundle", [write_own(folder, requirement), *wheels[1:]])

    done = install(target, *options, "--python", system, *parts_of(bundle))

    assert done.returncode == 0, done.stderr
    assert "leaf 1.5; bundle: 2.0" in done.stdout
    assert ("would use them" in done.stdout) == (not options)
    assert version(target / "nereid") == f"nereid 0.1.0 with leaf {leaf}"


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[1000] ^= 1
    path.write_bytes(content)


@cases(
    missing=(
        lambda part, sums: part.unlink(),
        ["missing parts: expected {count}, got {left} without {part.name};", "copy them"],
    ),
    one_bit=(lambda part, sums: flip_a_bit(part), ["damaged parts:\n  {part}: expected SHA-256"]),
    truncated=(
        lambda part, sums: part.write_bytes(part.read_bytes()[:100]),
        ["damaged parts:\n  {part}: expected SHA-256", "fix: copy these parts again"],
    ),
    foreign=(
        lambda part, sums: part.with_name("nereid-offline-9.9.tar.001").touch(),
        ["unknown part:", "nereid-offline-9.9.tar.001", "one bundle only"],
    ),
    no_sums=(lambda part, sums: sums.unlink(), ["missing sums: expected", "{sums}", "copy it"]),
    empty_sums=(lambda part, sums: sums.write_text(""), ["got none", "{sums}", "copy it"]),
    other_sums=(
        lambda part, sums: sums.write_text("<html>\n"),
        ["{sums}: expected nereid-offline-….tar.001", "copy it"],
    ),
)
def test_incomplete_bundle_is_an_error(harm, passages, bundle, target):
    count, part, sums = len(parts_of(bundle)), parts_of(bundle)[1], bundle / "SHA256SUMS"
    harm(part, sums)

    done = install(target, *parts_of(bundle))

    about = {"count": count, "left": count - 1, "part": part, "sums": sums}
    expect_error(done, target, *(passage.format(**about) for passage in passages))


@cases(
    Python=("cp39-manylinux_2_17_x86_64", f"wrong Python: expected CPython 3.9, got CPython {THIS}"),
    glibc=(f"{TAG}-manylinux_2_99_x86_64", "64-bit Python, glibc 2.99 or later, got Linux"),
    machine=(f"{TAG}-manylinux_2_17_aarch64", "wrong platform: expected Linux aarch64"),
)
def test_wrong_target_is_an_error(tags, problem, wheels, target, tmp_path):
    (target / "programs" / "python3").symlink_to(sys.executable)
    bundle = write_bundle(tmp_path / "bundle", wheels, tags)

    expect_error(install(target, *parts_of(bundle)), target, problem, "; fix: ")


def lacking_python(target: Path) -> list[str]:
    (target / "programs" / f"python{THIS}").unlink()
    return []


def lacking_venv(target: Path) -> list[str]:
    python = target / "python"
    lacking = "import sys; sys.modules['venv'] = None\n"
    python.write_text(
        f'#!/bin/sh\nshift 2\ncode=$1\nshift\nexec \'{sys.executable}\' -I -c "{lacking}$code" "$@"\n'
    )
    python.chmod(0o755)
    return ["--python", str(python)]


def used_folder(target: Path) -> list[str]:
    (target / "data").mkdir()
    (target / "data" / "precious").touch()
    return ["--into", "data"]


@cases(
    no_Python=(lacking_python, [f"missing Python: expected python{THIS} or python3"]),
    absent_Python=(
        lambda target: ["--python", "absent"],
        [f"wrong Python: expected Python {THIS}, got 'absent'", "fix: --python PATH"],
    ),
    no_venv=(lacking_venv, ["expected the module venv in", f"install the package python{THIS}-venv"]),
    # An environment of an environment would not have its packages.
    packages_of_an_environment=(
        lambda target: ["--python", f"{sys.prefix}/bin/python", "--system-site-packages"],
        ["expected the Python of the system", f"a Python in {sys.base_prefix}"],
    ),
    used_folder=(used_folder, ["'data' is in use: expected a new or empty folder"]),
)
def test_unsuitable_machine_is_an_error(arrange, passages, bundle, target):
    words = arrange(target)
    before = {*target.rglob("*")}

    expect_error(install(target, *parts_of(bundle), *words), target, *passages)

    assert {*target.rglob("*")} == before


@cases(
    no_parts=([], "no parts: expected"),
    no_value=(["--into"], "--into: expected a value"),
    unknown=(["--intoo=x"], "unknown option '--intoo=x'"),
)
def test_wrong_usage_is_an_error(words, passage, target):
    expect_error(install(target, *words), target, passage, "usage: sh install-offline.sh", code=2)


def test_failure_of_pip_leaves_nothing(wheels, target, tmp_path):
    own_wheel, _, pip = wheels
    bundle = write_bundle(tmp_path / "bundle", [own_wheel, pip])

    expect_error(install(target, *parts_of(bundle)), target, "leaf", "error: pip failed")


def test_repeat_repairs_a_killed_installation(bundle, target):
    """Also in another folder, with another interpreter."""
    (target / "programs" / f"python{THIS}").unlink()
    folder = target / "my tools" / "nereid"
    (folder / ".incomplete").mkdir(parents=True)
    (folder / "stale").touch()

    done = install(target, *parts_of(bundle), "--into", "my tools/nereid", f"--python={sys.executable}")

    assert (done.returncode, "removing an incomplete installation" in done.stdout) == (0, True), done.stderr
    assert version(folder) == "nereid 0.1.0 with leaf 2.0"
    assert not (folder / "stale").exists()


def test_interrupted_installation_leaves_nothing(bundle, target):
    command = ["sh", str(INSTALLER), *map(str, parts_of(bundle))]
    environment = {"PATH": str(target / "programs"), "HOME": str(target)}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, cwd=target, env=environment, start_new_session=True, **quiet)
    wait_until(lambda: (target / "nereid" / "pyvenv.cfg").exists(), "the environment")

    os.killpg(process.pid, signal.SIGINT)

    assert process.wait(INSTALL_S) != 0
    assert not (target / "nereid").exists()


def test_built_bundle_installs_the_project(target, tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = [sys.executable, "-m", "tools.offline_bundle", "--extras", "traces", "--part", "20M"]
    built = captured(
        [*command, "--out", str(tmp_path / "bundle")], cwd=ROOT, env=environment, timeout=BUILD_S
    )
    assert built.returncode == 0, built.stderr
    parts = parts_of(tmp_path / "bundle")

    done = install(target, *parts)

    assert len(parts) > 2
    assert done.returncode == 0, done.stderr
    assert version(target / "nereid").startswith("nereid ")
    python = target / "nereid" / "bin" / "python"
    subprocess.run([python, "-c", "import opentelemetry.sdk"], check=True)
