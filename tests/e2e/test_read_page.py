"""The page's tabs for reading, in a real browser, against the real gateway and the real server."""

import io
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import onnx
import pytest
from PIL import Image

from nereid.assets import COFFEE, REPOSITORY, TEXT_REPOSITORY
from nereid.cli.route_commands.gateway_route import RepositoryModels
from nereid.gateway.admission.keys import KeyRing
from nereid.gateway.http.app import create_app, create_gateway
from nereid.gateway.settings import Settings
from nereid.publish.add import AddRequest, add
from nereid.server.command_line import ServerOptions
from nereid.server.embedded_server import EmbeddedServer
from nereid.server.ports import Ports, free_ports
from nereid.server.run_dir import ServerRecord
from tests.detectors import CLASSES, KNOWN, SIDE, TestDetector
from tests.e2e.conftest import url
from tests.labels import BLANK, LABEL, WORDS
from tests.pictures import noise, save
from tests.webpage import CONTRASTS, DESK, PHONE, VIOLATIONS, WATCHDOG_S, listening, running_browser, upload

pytest.importorskip("cv2", reason="opencv is not installed: extra text")
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: extra dev")
pytestmark = pytest.mark.slow
MAX_PICTURE_BYTES = 280_000
FILE = {"name": "label.png", "mimeType": "image/png", "buffer": LABEL}
# A box of the overlay and the picture, in pixels of the page.
PLACES = """() => [".boxes img", ".boxes polygon"].map((each) => {
  const {x, y, width, height} = document.querySelector(each).getBoundingClientRect();
  return [x, y, width, height];
})"""


@pytest.fixture(scope="module")
def origins(tmp_path_factory) -> Iterator[dict[str, str]]:
    """Gateways by name: `several` offers all tasks, `text` only reading."""
    base = tmp_path_factory.mktemp("page")
    repository = base / "repository"
    for source in (REPOSITORY, TEXT_REPOSITORY):
        shutil.copytree(
            source, repository, ignore=shutil.ignore_patterns("*.history.jsonl"), dirs_exist_ok=True
        )
    add_detector(base, repository)
    options = ServerOptions(repository, "cpu", ports=Ports(*free_ports(3)))
    with EmbeddedServer(options, base, os.environ) as server, ExitStack() as stack:
        record = ServerRecord(server.pid, options.host, options.ports, str(repository), "cpu", "")
        settings = {
            "several": (Settings(url=url(server, "http")), repository),
            "text": (Settings(url=url(server, "http"), model="read_text"), TEXT_REPOSITORY),
        }
        yield {
            name: stack.enter_context(
                listening(
                    create_app(create_gateway(each, KeyRing(), RepositoryModels(folder, lambda: record)))
                )
            )
            for name, (each, folder) in settings.items()
        }


def add_detector(folder: Path, repository: Path) -> None:
    """Add a detector with known boxes to a repository."""
    (folder / "labels.txt").write_text("\n".join(CLASSES) + "\n")
    onnx.save(TestDetector("yolov8").build(), folder / "cars.onnx")
    network, labels = folder / "cars.onnx", folder / "labels.txt"
    add(repository, AddRequest(network, "cars", {"preset": "yolo"}, labels, task="detect"), None)


@pytest.fixture(scope="module")
def browser() -> Iterator["sync_api.Browser"]:
    """A headless browser."""
    with running_browser() as running:
        yield running


@pytest.fixture
def visit(browser, origins) -> Iterator[Callable]:
    """Open a gateway's page in a new profile."""
    with ExitStack() as stack:

        def open_page(name: str, **options):
            context = browser.new_context(**{"viewport": DESK, **options})
            stack.callback(context.close)
            page = context.new_page()
            page.set_default_timeout(WATCHDOG_S * 1000)
            page.on("filechooser", lambda chooser: None)
            page.add_init_script(VIOLATIONS)
            page.goto(origins[name])
            return page

        yield open_page


def read_label(page) -> None:
    """Choose the tab, upload the label, and wait for its lines."""
    page.get_by_role("tab", name="Read text").click()
    upload(page, FILE)
    sync_api.expect(page.locator("#verdict")).to_have_text("3 lines")


def test_lines_are_shown_with_their_boxes(visit):
    """The list has the text in reading order; the first box lies over the first words of the picture."""
    page = visit("several")

    read_label(page)

    items = page.locator(".found li")
    assert [items.nth(place).locator("span").first.inner_text() for place in range(3)] == WORDS
    sync_api.expect(page.locator(".boxes polygon")).to_have_count(3)
    (left, top, width, height), (x, y, box_width, box_height) = page.evaluate(PLACES)
    assert width / height == pytest.approx(900 / 500, rel=0.01)
    assert (x - left) / width * 900 == pytest.approx(60, abs=15)
    assert 20 < (y - top) / height * 500 < 70
    assert 300 < box_width / width * 900 < 600
    assert 30 < box_height / height * 500 < 100
    sync_api.expect(page.locator("#answer .source")).to_contain_text("v1 answered, selected by weight")
    assert "/v1/models/read_text/read" in page.locator("#curl").inner_text()
    assert page.evaluate("violations") == []


def test_entry_and_box_highlight_each_other(visit):
    """The pointer on one lights both; so does the keyboard, with one stop for each group."""
    page = visit("several")
    read_label(page)
    items, boxes = page.locator(".found li"), page.locator(".boxes polygon")

    items.nth(1).hover()
    lit = "(elements) => elements.map((each) => each.classList.contains('lit'))"
    assert boxes.evaluate_all(lit) == items.evaluate_all(lit) == [False, True, False]
    boxes.nth(2).hover()
    assert boxes.evaluate_all(lit) == items.evaluate_all(lit) == [False, False, True]
    page.mouse.move(0, 0)
    assert True not in items.evaluate_all(lit)

    items.first.focus()
    page.keyboard.press("ArrowDown")
    assert boxes.evaluate_all(lit) == [False, True, False]
    assert items.nth(1).get_attribute("aria-selected") == "true"
    page.keyboard.press("Shift+Tab")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == f"Line: {WORDS[0]}"
    page.keyboard.press("End")
    assert items.evaluate_all(lit) == [False, False, True]


def test_fields_highlight_their_boxes(visit):
    """The tab for waybills lists fields with their checksum; a missing field lights no box."""
    page = visit("several")
    page.get_by_role("tab", name="Read a waybill").click()

    upload(page, FILE)

    sync_api.expect(page.locator("#verdict")).to_contain_text("fields found")
    fields = page.get_by_role("listbox", name="Fields").get_by_role("option")
    number = fields.filter(has_text="tracking_number")
    sync_api.expect(number.locator("strong")).to_have_text(WORDS[1])
    sync_api.expect(number.locator(".badge")).to_have_text("checksum right")
    number.hover()
    assert number.evaluate("each => each.classList.contains('lit')")
    lit = page.locator(".boxes polygon.lit")
    assert lit.get_attribute("aria-label") == f"tracking_number: {WORDS[1]}"
    missing = fields.filter(has_text="not found")
    assert missing.count() > 0
    missing.first.hover()
    assert page.locator(".boxes polygon.lit").count() == 0


def test_another_tab_repeats_the_image(visit):
    """The same image is classified and read; each tab has its own options."""
    page = visit("several")
    upload(page, COFFEE)
    sync_api.expect(page.locator("#verdict strong")).to_have_text("espresso")

    page.get_by_role("tab", name="Read text").press("ArrowLeft")
    page.get_by_role("tab", name="Read text").click()

    sync_api.expect(page.locator(".boxes img")).to_be_visible()
    sync_api.expect(page.locator("#again")).to_have_text("Read again")
    assert not page.locator("#compare").is_visible()
    assert not page.get_by_label("Classes shown").is_visible()
    assert not page.locator("#seen").is_visible()
    sync_api.expect(page.locator("#served")).to_contain_text("read_text")
    page.get_by_role("tab", name="Classify").click()
    sync_api.expect(page.locator("#verdict strong")).to_have_text("espresso")
    assert page.locator("#compare").is_visible()


def test_image_without_text_says_so(visit):
    """The picture is shown without boxes."""
    page = visit("several")
    page.get_by_role("tab", name="Read text").click()

    upload(page, {**FILE, "buffer": BLANK})

    sync_api.expect(page.locator("#verdict")).to_have_text("No line found.")
    sync_api.expect(page.locator(".boxes polygon")).to_have_count(0)


def test_objects_are_shown_with_their_boxes(visit):
    """The list has the labels, best first; boxes have the place of the known ones."""
    page = visit("several")
    page.get_by_role("tab", name="Find objects").click()

    photo = save(Image.fromarray(noise(2 * SIDE, 2 * SIDE)))
    upload(page, {"name": "noise.png", "mimeType": "image/png", "buffer": photo})

    sync_api.expect(page.locator("#verdict")).to_have_text(f"{len(KNOWN)} objects")
    labels = page.locator(".found li span:first-child").all_inner_texts()
    assert labels == [CLASSES[index] for _, _, index in KNOWN]
    (left, top, width, height), (x, y, box_width, box_height) = page.evaluate(PLACES)
    scale = width / (2 * SIDE)
    assert height == pytest.approx(width, abs=1)
    found = (x - left, y - top, x - left + box_width, y - top + box_height)
    # The outline of a box adds a pixel on each side.
    assert [each / scale for each in found] == pytest.approx(
        [2 * side for side in KNOWN[0][0]], abs=3 / scale
    )


def test_tabs_are_those_of_the_models(visit):
    """A server of text models has a tab for text and one for waybills; the sample suits both."""
    page = visit("text")
    sync_api.expect(page.locator("#classify-title")).to_have_text("Read text")

    page.get_by_role("button", name="parcel label").click()

    sync_api.expect(page.locator("#verdict")).to_contain_text("lines")
    assert page.locator(".sample").count() == 1
    assert page.locator("#tasks button").all_inner_texts() == ["Read text", "Read a waybill"]
    sync_api.expect(page.locator("#connection")).to_have_text("live")


def test_turned_photo_has_upright_boxes(visit):
    """Boxes fit a picture that its EXIF data turn."""
    page = visit("several")
    exif = Image.Exif()
    exif[0x0112] = 6  # shown after a quarter turn clockwise
    target = io.BytesIO()
    Image.open(io.BytesIO(LABEL)).rotate(90, expand=True).save(target, "JPEG", exif=exif, quality=95)
    page.get_by_role("tab", name="Read text").click()

    upload(page, {"name": "turned.jpg", "mimeType": "image/jpeg", "buffer": target.getvalue()})

    sync_api.expect(page.locator("#verdict")).to_have_text("3 lines")
    (left, top, width, height), (x, y, _, _) = page.evaluate(PLACES)
    assert width / height == pytest.approx(900 / 500, rel=0.01)
    assert (x - left) / width * 900 == pytest.approx(60, abs=15)
    assert 20 < (y - top) / height * 500 < 70


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_is_readable_and_fits_a_phone(visit, scheme):
    """Texts have a contrast of at least 4.5:1, and nothing needs sideways scrolling at 360 px."""
    page = visit("several", color_scheme=scheme, viewport=PHONE)
    read_label(page)
    page.locator(".found li").first.focus()

    texts = page.evaluate(CONTRASTS)

    assert len(texts) > 30
    assert [(text, round(contrast, 2)) for text, contrast in texts if contrast < 4.5] == []
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]


def test_picture_is_small(visit, tmp_path):
    """The screenshot of the docs is below a size limit; `SCREENSHOTS` sets its folder."""
    folder = Path(os.environ.get("SCREENSHOTS", tmp_path))
    page = visit("several")
    page.get_by_role("tab", name="Read text").click()
    page.get_by_role("button", name="parcel label").click()
    sync_api.expect(page.locator("#verdict")).to_contain_text("lines")
    page.locator("#again").click()  # the picture should not show the load of a page start
    sync_api.expect(page.locator("#result")).to_have_attribute("aria-busy", "false")
    page.locator(".found li").nth(1).hover()

    shown = page.locator("#classify").screenshot(animations="disabled")
    # Six bits a colour: no visible difference, and a quarter smaller.
    picture = Image.open(io.BytesIO(shown)).convert("RGB").point(lambda value: (value >> 2) * 255 // 63)
    picture.convert("RGB").save(folder / "page-read.png", optimize=True)

    assert (folder / "page-read.png").stat().st_size < MAX_PICTURE_BYTES
