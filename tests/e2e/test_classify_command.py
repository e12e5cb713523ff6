"""`nereid classify` as a user runs it: output formats, folders with bad files, a watched folder."""

import contextlib
import csv
import io
import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import IO

import pytest

from nereid.base.assets import COFFEE
from tests.commands import captured
from tests.e2e.conftest import ESPRESSO, url
from tests.routes import WATCHDOG_S, wait_until
from tests.supervised import NEREID


@pytest.fixture
def command(fused):
    return [NEREID, "classify", "--url", url(fused, "grpc"), "--top", "1"]


@pytest.fixture
def photos(tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(12):
        shutil.copy(COFFEE, folder / f"{number:02}.jpg")
    (folder / "03.jpg").write_bytes(b"")
    (folder / "07.jpg").write_bytes(b"no image")
    os.mkfifo(folder / "pipe.jpg")
    return folder


def answers(form: str, printed: str) -> list[tuple[str, int | None, str]]:
    if form == "csv":
        rows = csv.DictReader(io.StringIO(printed))
        return [(row["image"], int(row["index"] or 0) or None, row["error"]) for row in rows]
    objects = json.loads(printed) if form == "json" else [*map(json.loads, printed.splitlines())]
    return [
        (item["image"], item["labels"][0]["index"] if "labels" in item else None, item.get("error", ""))
        for item in objects
    ]


@pytest.mark.parametrize("form", ["json", "jsonl", "csv"])
def test_formats_have_every_image(command, photos, form):
    flags = [f"--{form}", *(["--shm"] if form == "csv" else [])]

    done = captured([*command, photos, *flags], timeout=WATCHDOG_S)

    printed = answers(form, done.stdout)
    assert [name for name, _, _ in printed] == [str(photos / f"{number:02}.jpg") for number in range(12)]
    bad = {3: "invalid image: ", 7: "invalid image: "}
    for number, (_, index, error) in enumerate(printed):
        assert (index, error.startswith(bad.get(number, ""))) == (None if number in bad else ESPRESSO, True)
    assert re.findall(r"(\d\d).jpg: invalid image", done.stderr) == ["03", "07"]
    assert done.stderr.endswith("error: 2 of 12 images could not be classified\n")
    assert done.returncode == 1


def opened_pipe(path: Path) -> IO[bytes]:
    """Open a named pipe for writing, once the other side reads it."""

    def opened() -> int | None:
        with contextlib.suppress(OSError):
            return os.open(path, os.O_WRONLY | os.O_NONBLOCK)

    handle = wait_until(opened, "a reader")
    os.set_blocking(handle, True)
    return os.fdopen(handle, "wb")


def test_watched_folder_is_classified_as_it_fills(command, tmp_path):
    shutil.copy(COFFEE, tmp_path / "old.jpg")
    os.mkfifo(first := tmp_path / "first")
    output, log = tmp_path / "output", tmp_path / "log"
    watching = [*command, first, "--watch", tmp_path, "--csv"]
    with output.open("w") as stdout, log.open("w") as stderr:
        running = subprocess.Popen(watching, stdout=stdout, stderr=stderr)
    try:
        with opened_pipe(first) as pipe:
            shutil.copy(COFFEE, tmp_path / "early.jpg")
            pipe.write(COFFEE.read_bytes())
        wait_until(lambda: "watching" in log.read_text(), "the watch")
        (tmp_path / "bad.jpg").write_bytes(b"no image")
        content = COFFEE.read_bytes()
        with (tmp_path / "new.jpg").open("wb") as slow:
            slow.write(content[:20_000])
            slow.flush()
            time.sleep(0.6)  # shorter than a file must stay unchanged, and longer than one poll
            slow.write(content[20_000:])
        wait_until(lambda: len(output.read_text().splitlines()) == 5, "all answers")
        running.send_signal(signal.SIGINT)
        status = running.wait(WATCHDOG_S)
    finally:
        running.kill()
        running.wait()

    printed = {
        Path(name).name: (index, error[:13]) for name, index, error in answers("csv", output.read_text())
    }
    good = dict.fromkeys(["first", "early.jpg", "new.jpg"], (ESPRESSO, ""))
    assert printed == {"bad.jpg": (None, "invalid image")} | good
    assert (status, log.read_text().splitlines()[-1]) == (0, "stopped")
