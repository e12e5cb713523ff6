"""The gateway's page in a browser, and the helpers of its tests."""

import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: extra dev")
uvicorn = pytest.importorskip("uvicorn", reason="uvicorn is not installed: extra gateway")
WATCHDOG_S = 20
PHONE, DESK = {"width": 360, "height": 780}, {"width": 1280, "height": 900}
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# Relative luminance and contrast as WCAG 2.2 defines them, of every text that is seen.
CONTRASTS = Path(__file__).with_name("contrasts.js").read_text()
VIOLATIONS = """window.violations = [];
addEventListener("securitypolicyviolation", (event) => violations.push(
  `${event.effectiveDirective} ${event.blockedURI} ${event.sourceFile}:${event.lineNumber}`));"""


@contextmanager
def listening(app: Any) -> Iterator[str]:
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", ws="none", access_log=False))
    thread = threading.Thread(target=server.run)
    thread.start()
    deadline = time.monotonic() + WATCHDOG_S
    while not server.started and thread.is_alive() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert server.started
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(WATCHDOG_S)


@contextmanager
def running_browser() -> Iterator[Any]:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if not browser:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed; fix: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        # Chromium has no sandbox for root; the page is trusted.
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        running = playwright.chromium.launch(executable_path=browser, args=arguments)
        sync_api.expect.set_options(timeout=WATCHDOG_S * 1000)
        yield running
        running.close()


def upload(page: Any, *files: Any) -> None:
    with page.expect_file_chooser() as chooser:
        page.locator("#drop").click()
    chooser.value.set_files(*files)
