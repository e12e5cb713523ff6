"""The gateway's page in a real browser, against the real gateway and the real server."""

import io
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from PIL import Image

from nereid.application.repository_models import RepositoryModels
from nereid.base.assets import CHELSEA, COFFEE, TEXT_REPOSITORY
from nereid.base.processes import in_background
from nereid.client.client_errors import Unreachable
from nereid.gateway import key_changes
from nereid.gateway.http.app import create_app, create_gateway
from nereid.gateway.keys import KeyRing
from nereid.gateway.settings import GatewaySettings
from nereid.models.rollout import commands, service
from nereid.models.routes.location import find_route
from tests.commands import captured
from tests.detectors import CLASSES, KNOWN, SIDE, add_detector
from tests.e2e.conftest import url
from tests.embedders import DIMS
from tests.gateways import PREDICTION, Upstream
from tests.gateways import gateway as in_front_of
from tests.labels import BLANK, LABEL, WORDS
from tests.networks import serve
from tests.pictures import exif, save
from tests.tasks import PHOTO, store_tasks
from tests.webpage import CONTRASTS, DESK, PHONE, VIOLATIONS, WATCHDOG_S, listening, running_browser, upload

pytest.importorskip("cv2", reason="opencv is not installed: extra text")
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: extra dev")
pytestmark = pytest.mark.nightly(minutes=4)

# The route reports its counts every half second.
METRICS_MS = 3_000
FILE = {"name": "label.png", "mimeType": "image/png"}
NOTES = {"name": "notes.txt", "mimeType": "text/plain", "buffer": b"this is not an image"}
# The corners of the first box, as shares of the picture's width and height.
CORNERS = """() => {
  const [image, box] = [".boxes img", ".boxes polygon"].map((each) =>
    document.querySelector(each).getBoundingClientRect());
  const [x, y] = [(value) => (value - image.x) / image.width, (value) => (value - image.y) / image.height];
  return [x(box.left), y(box.top), x(box.right), y(box.bottom)];
}"""


@dataclass(frozen=True, slots=True)
class Gateway:
    origin: str
    route_file: Path
    secrets: dict[str, str]

    def weights(self) -> dict[str, float]:
        variants = json.loads(self.route_file.read_text())["variants"]
        return {variant["name"]: variant["weight"] for variant in variants}


class Listed(RepositoryModels):
    """The models of a repository that come first, and no others."""

    def names(self) -> list[str]:
        return [*self._first]


@dataclass(slots=True)
class Seen:
    page: "sync_api.Page"
    requests: list[str] = field(default_factory=list)
    console: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def gateways(tmp_path_factory):
    """Gateways of one server, by name.

    `keyed` requires keys; `open` has none; `several` offers two models. `tasks`
    offers all tasks, `text` only reading.
    """
    base = tmp_path_factory.mktemp("page")
    repository = store_tasks(base)
    add_detector(base)
    key_file = base / "keys.json"
    secrets = {
        "infer": key_changes.add(key_file, "infer", ["infer"], None),
        "route": key_changes.add(key_file, "route", ["infer", "route"], None),
        "slow": key_changes.add(key_file, "slow", ["infer"], 0.1),
    }
    with serve(repository, base, profile="cpu") as server, ExitStack() as stack:
        server_info = server.info()
        settings = GatewaySettings(url=url(server, "http"))

        def gateway(models, settings=settings, ring=None) -> Gateway:
            app = create_app(create_gateway(settings, ring or KeyRing(), models))
            origin = stack.enter_context(listening(app))
            return Gateway(origin, repository / "classify.route.json", secrets)

        def models(*names: str, folder=repository) -> RepositoryModels:
            kind = Listed if names else RepositoryModels
            return kind(folder, lambda: server_info, names)

        yield {
            "keyed": gateway(models("classify"), replace(settings, keys_needed=True), KeyRing(key_file)),
            "open": gateway(models("classify")),
            "several": gateway(models("classify", "classify_v2")),
            "tasks": gateway(models()),
            "text": gateway(models(folder=TEXT_REPOSITORY), replace(settings, model="read_text")),
        }


@pytest.fixture(scope="module")
def browser():
    with running_browser() as running:
        yield running


@pytest.fixture
def visit(browser, gateways) -> Iterator[Callable]:
    with ExitStack() as stack:

        def open_page(name: str, key: str = "", **options) -> Seen:
            context = browser.new_context(**{"viewport": DESK, **options})
            stack.callback(context.close)
            page = context.new_page()
            page.set_default_timeout(WATCHDOG_S * 1000)
            seen = Seen(page)
            # Otherwise the dialog may open before Playwright listens for it.
            page.on("filechooser", lambda chooser: None)
            page.add_init_script(VIOLATIONS)
            page.on("request", lambda request: seen.requests.append(request.url))
            page.on("console", lambda message: seen.console.append(f"{message.type}: {message.text}"))
            page.on("pageerror", lambda error: seen.console.append(f"error: {error}"))
            page.goto(gateways[name].origin)
            if key:
                sign_in(page, gateways[name].secrets[key])
            return seen

        yield open_page


def sign_in(page, secret: str) -> None:
    page.get_by_text("Key", exact=True).click()
    enter_key(page, secret)
    sync_api.expect(page.locator("#access-name")).to_contain_text("Key: ")
    page.keyboard.press("Escape")


def enter_key(page, secret: str) -> None:
    page.get_by_label("API key").fill(secret)
    page.get_by_role("button", name="Sign in").click()


def classify_coffee(page) -> None:
    upload(page, COFFEE)
    expect_verdict(page, "espresso")


def read_label(page, image: bytes = LABEL) -> None:
    page.get_by_role("tab", name="Read text").click()
    upload(page, {**FILE, "buffer": image})
    sync_api.expect(page.locator("#verdict")).to_have_text("3 lines")


def weight(page, variant: str):
    return page.get_by_role("spinbutton", name=variant)


def fill_weights(page, v1: str, v2: str) -> None:
    weight(page, "v1").fill(v1)
    weight(page, "v2").fill(v2)


def apply_weights(page, v1: str, v2: str) -> None:
    fill_weights(page, v1, v2)
    page.get_by_role("button", name="Apply").click()
    expect_message(page, "is served.")


def expect_verdict(page, text: str) -> None:
    sync_api.expect(page.locator("#verdict strong")).to_have_text(text)


def expect_busy(page, is_busy: str) -> None:
    sync_api.expect(page.locator("#result")).to_have_attribute("aria-busy", is_busy)


def expect_message(page, text: str) -> None:
    sync_api.expect(page.locator("#weights-message")).to_contain_text(text)


def tabbed(page, until: Callable[[str], bool] = lambda name: False, max_steps: int = 60) -> list[str]:
    """Press Tab until `until` accepts the focus, or the focus is back at the start; return all names."""
    names: list[str] = []
    for _ in range(max_steps):
        page.keyboard.press("Tab")
        name = page.evaluate(
            "(({id, ariaLabel, textContent, tagName}) => tagName === 'BODY' ? '' "
            ": id || ariaLabel || textContent.trim())(document.activeElement)"
        )
        if not name:
            break
        names.append(name)
        if until(name):
            break
    return names


def test_upload_puts_espresso_on_top_with_its_bar_and_variant(visit):
    page = visit("open").page
    sync_api.expect(page.locator("#served")).to_have_text("classify")

    classify_coffee(page)

    rows = page.locator("#answer .bars li")
    assert rows.count() == 5
    assert rows.first.locator(".label").inner_text() == "espresso"
    drawn, track = (rows.first.locator(selector).bounding_box()["width"] for selector in (".fill", ".track"))
    shown = float(rows.first.locator(".score").inner_text().rstrip("\u00a0%")) / 100
    assert shown > 0.9
    assert drawn / track == pytest.approx(shown, abs=0.01)
    assert page.locator("#answer .source").inner_text() in {
        f"{name} answered, selected by weight." for name in ("v1", "v2")
    }
    assert "inference" in page.locator("#answer .stack").get_attribute("aria-label")
    assert page.locator("#thumbnail").evaluate("image => image.naturalWidth") == 600
    assert not page.locator("#model").is_visible()
    badges = page.locator("#variants .badge")
    sync_api.expect(badges.first).to_be_visible()
    assert {*badges.all_inner_texts()} <= {"answers", "no requests yet"}
    sync_api.expect(page.locator("#seen")).to_be_visible()
    size = page.locator("#seen-image").evaluate("image => [image.naturalWidth, image.naturalHeight]")
    assert size == [224, 224]


def test_images_are_chosen_with_the_keyboard_alone(visit):
    page = visit("open").page
    sync_api.expect(page.locator(".sample")).to_have_count(2)
    tabbed(page, lambda name: name == "drop")

    for key, photo in (("Enter", COFFEE), ("Space", CHELSEA)):
        with page.expect_file_chooser() as chooser:
            page.keyboard.press(key)
        chooser.value.set_files(photo)
        sync_api.expect(page.locator("#drop-label")).to_have_text(photo.name)
    sync_api.expect(page.locator("#verdict strong")).not_to_have_text("espresso")

    assert tabbed(page, lambda name: name == "coffee")[-1] == "coffee"
    page.keyboard.press("Enter")
    expect_verdict(page, "espresso")


def test_image_is_pasted(visit):
    page = visit("open", permissions=["clipboard-read", "clipboard-write"]).page
    page.evaluate(
        """async () => {
            const image = await createImageBitmap(await (await fetch("samples/coffee.jpg")).blob());
            const canvas = new OffscreenCanvas(image.width, image.height);
            canvas.getContext("2d").drawImage(image, 0, 0);
            const png = await canvas.convertToBlob();
            await navigator.clipboard.write([new ClipboardItem({"image/png": png})]);
        }"""
    )

    page.keyboard.press("Control+V")

    expect_verdict(page, "espresso")
    page.evaluate("navigator.clipboard.writeText('alice')")
    page.locator("#route-key").focus()
    page.keyboard.press("Control+V")
    assert page.locator("#route-key").input_value() == "alice"
    page.keyboard.press("Enter")
    sync_api.expect(page.locator("#answer .source")).to_contain_text("selected by the route key")


def test_file_is_dropped_anywhere(visit):
    page = visit("open").page
    devtools = page.context.new_cdp_session(page)
    data = {"items": [], "files": [str(COFFEE)], "dragOperationsMask": 1}

    deadline = time.monotonic() + WATCHDOG_S
    # The browser ignores a drop before the page has accepted the drag.
    while page.locator("#drop-label").inner_text() != COFFEE.name:
        assert time.monotonic() < deadline
        for step in ("dragEnter", "dragOver", "dragOver", "drop"):
            devtools.send("Input.dispatchDragEvent", {"type": step, "x": 900, "y": 600, "data": data})
            page.wait_for_timeout(50)

    expect_verdict(page, "espresso")
    assert page.title() == "Nereid"


def test_text_file_is_refused_with_the_expected_format(visit):
    page = visit("open").page
    name = "<img src=x onerror=document.title='taken'>.jpg"
    upload(page, {"name": name, "mimeType": "image/jpeg", "buffer": COFFEE.read_bytes()})
    expect_verdict(page, "espresso")
    assert page.locator("#drop-label").inner_text() == name
    assert (page.title(), page.locator("#drop-label img").count()) == ("Nereid", 0)

    upload(page, NOTES)

    error = page.locator("#error")
    sync_api.expect(error.locator(".code-name")).to_have_text("invalid_image")
    sync_api.expect(error).to_contain_text("JPEG")
    assert error.get_attribute("role") == "alert"
    assert page.locator("#answer").inner_text() == ""


def test_new_image_cancels_the_previous_request(visit):
    page = visit("open").page
    held, failed = [], []
    page.route("**/predict*", lambda route: route.continue_() if held else held.append(route))
    page.on("requestfailed", lambda request: failed.append(request.failure))

    upload(page, CHELSEA)
    expect_busy(page, "true")
    upload(page, COFFEE)

    expect_verdict(page, "espresso")
    assert failed == ["net::ERR_ABORTED"]


def test_comparison_uses_every_variant(visit, gateways):
    seen, origin = visit("keyed", key="route"), gateways["keyed"].origin
    page = seen.page
    upload(page, COFFEE)

    page.get_by_role("button", name="Classify with every variant").click()

    sync_api.expect(page.locator("#agreement")).to_have_text("Both agree: espresso.")
    columns = page.locator("#columns article")
    assert [column.locator("h3 .variant").inner_text() for column in columns.all()] == ["v1", "v2"]
    for column in columns.all():
        assert column.locator(".bars li").count() == 5
        assert column.get_attribute("data-agrees") == "true"
        sync_api.expect(column.locator(".latency")).to_contain_text(" ms inference, median of 3")
    variants = [parse_qs(urlsplit(address).query).get("variant") for address in seen.requests]
    assert (variants.count(["v1"]), variants.count(["v2"])) == (3, 3)
    sync_api.expect(page.locator("#connection")).to_have_text("live")
    for name in ("v1", "v2"):
        row = page.locator("#variants tr").filter(has_text=name)
        sync_api.expect(row.locator(".badge")).to_have_text("answers")
        sync_api.expect(row.locator("td").last).not_to_have_text("–")
    sync_api.expect(page.locator("#outcomes")).to_contain_text("ok ")
    assert page.locator("#charts svg[role=img]").count() == 2
    assert "default-src 'none'" in page.request.get(origin).headers["content-security-policy"]
    assert [link for link in seen.requests if not link.startswith((f"{origin}/", f"blob:{origin}/"))] == []
    assert len(seen.requests) > 15
    assert (page.evaluate("violations"), seen.console) == ([], [])


def test_page_polls_only_if_it_is_seen_and_connected(visit):
    seen = visit("open")
    page, connection = seen.page, seen.page.locator("#connection")
    hide = "value => { Object.defineProperty(document, 'hidden', {value, configurable: true}); "
    hide += "document.dispatchEvent(new Event('visibilitychange')); }"
    sync_api.expect(connection).to_have_text("live")

    page.evaluate(hide, True)
    sync_api.expect(connection).to_have_text("paused")
    page.wait_for_timeout(300)
    before = len(seen.requests)
    page.wait_for_timeout(1200)

    assert len(seen.requests) == before
    page.evaluate(hide, False)
    sync_api.expect(connection).to_have_text("live")
    page.context.set_offline(True)
    sync_api.expect(connection).to_contain_text("no connection, next try in 2 s")
    upload(page, COFFEE)
    sync_api.expect(page.locator("#error .code-name")).to_have_text("no_connection")
    page.context.set_offline(False)
    sync_api.expect(connection).to_have_text("live")


def test_key_stays_in_its_tab(visit, gateways):
    seen, secret = visit("keyed"), gateways["keyed"].secrets["route"]
    page = seen.page
    sync_api.expect(page.locator("#connection")).to_have_text("key needed")
    assert not any("/v1/live" in address or "/v1/route" in address for address in seen.requests)
    upload(page, COFFEE)
    sync_api.expect(page.locator("#error .code-name")).to_have_text("unauthenticated")
    page.get_by_text("Key", exact=True).click()
    enter_key(page, "nereid_of-somebody-else")
    sync_api.expect(page.locator("#access-message")).to_have_text("Unknown key.")
    assert page.evaluate("sessionStorage.length") == 0
    enter_key(page, secret)

    expect_verdict(page, "espresso")
    sync_api.expect(page.locator("#error")).to_be_empty()
    assert page.evaluate("Object.values(sessionStorage)") == [secret]
    assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
    assert secret not in page.content()
    page.reload()
    sync_api.expect(page.locator("#access-name")).to_have_text("Key: route")
    page.locator("#access-name").click()
    page.get_by_role("button", name="Sign out").click()
    sync_api.expect(page.locator("#connection")).to_have_text("key needed")
    assert page.evaluate("sessionStorage.length") == 0


def test_weights_are_changed_on_the_server(visit, gateways):
    page = visit("keyed", key="route").page
    for v1, v2, message in (("0", "0", "must be above 0."), ("-1", "2", "must be a number of at least 0.")):
        fill_weights(page, v1, v2)
        expect_message(page, message)
        assert page.get_by_role("button", name="Apply").is_disabled()
    fill_weights(page, "30", "70")
    sync_api.expect(page.locator("#weights output")).to_have_text(["30.0\u00a0%", "70.0\u00a0%"])

    page.get_by_role("button", name="Apply").click()

    expect_message(page, "is served.")
    assert gateways["keyed"].weights() == {"v1": 30, "v2": 70}
    row = page.locator("#variants tr").filter(has_text="v2")
    sync_api.expect(row.locator(".share")).to_contain_text("70.0\u00a0%")
    sync_api.expect(page.get_by_role("button", name="Apply")).to_be_disabled()


def test_rollout_is_started_paused_and_aborted(visit, gateways):
    page = visit("keyed", key="route").page
    apply_weights(page, "100", "0")
    classify_coffee(page)
    page.wait_for_timeout(METRICS_MS)  # the rollout needs the median of the control
    text, message = page.locator("#rollout-text"), page.locator("#rollout-message")
    repository = gateways["keyed"].route_file.parent

    page.get_by_role("button", name="Start a rollout of v2").click()
    sync_api.expect(message).to_contain_text("no controller is running")
    # This controller finds no server, so it waits.
    run = partial(service.run, repository, lambda: None, log=print)
    with in_background("rollouts", run, WATCHDOG_S):
        assert commands.wait_controlled(find_route(repository, "classify"))
        page.get_by_role("button", name="Start a rollout of v2").click()
        sync_api.expect(text).to_contain_text("step 1 %: waiting: see nereid rollout status")
        page.get_by_role("button", name="Pause").click()
        sync_api.expect(text).to_contain_text("of v2: paused at step 1 %: pause through the gateway by route")
        other = visit("keyed", key="infer").page
        sync_api.expect(other.locator("#rollout-text")).to_contain_text("paused at step 1 %")
        assert other.get_by_role("button", name="Resume").is_disabled()
        page.get_by_role("button", name="Abort").click()
        sync_api.expect(text).to_contain_text("aborted, ended at step 1 %")
    sync_api.expect(page.get_by_role("button", name="Start a rollout of v2")).to_be_enabled()
    apply_weights(page, "50", "50")


@pytest.mark.parametrize(("name", "key"), [("open", ""), ("keyed", "infer")])
def test_weights_are_closed_without_the_scope(visit, name, key):
    page = visit(name, key=key).page

    sync_api.expect(page.locator("#weights-why")).to_contain_text("nereid key add NAME --scope route")
    assert weight(page, "v1").is_disabled()
    assert page.get_by_role("button", name="Apply").is_disabled()


def test_change_by_another_user_is_shown(visit, gateways):
    page = visit("keyed", key="route").page
    weight(page, "v1").fill("12")
    other = visit("keyed", key="route").page
    apply_weights(other, "44", "56")
    sync_api.expect(page.locator("#route-detail")).to_contain_text("Another user has changed the route")
    assert weight(page, "v1").input_value() == "12"

    page.get_by_role("button", name="Apply").click()

    expect_message(page, "yours were not applied")
    assert weight(page, "v1").input_value() == "44"
    assert gateways["keyed"].weights() == {"v1": 44, "v2": 56}


def test_rate_limit_is_shown_with_the_retry_time(visit):
    page = visit("keyed", key="slow").page
    upload(page, COFFEE)
    error = page.locator("#error")

    for _ in range(30):
        page.locator("#again").click()
        expect_busy(page, "false")
        if error.inner_text():
            break

    sync_api.expect(error.locator(".code-name")).to_have_text("rate_limited")
    sync_api.expect(error).to_contain_text("Retry after ")


def test_command_line_sends_the_same_request(visit, gateways, tmp_path):
    page = visit("keyed", key="infer").page
    photo = shutil.copy(COFFEE, tmp_path / "it's a cup.jpg")
    page.locator("#variant").select_option("v2")
    page.locator("#top-k").fill("3")
    upload(page, photo)
    expect_verdict(page, "espresso")
    line = page.locator("#curl").text_content()

    environment = os.environ | {"NEREID_KEY": gateways["keyed"].secrets["infer"]}
    done = captured(["sh", "-c", line], cwd=tmp_path, env=environment, timeout=WATCHDOG_S)

    answer = json.loads(done.stdout)
    assert (answer["variant"], answer["reason"]) == ("v2", "variant")
    assert answer["predictions"][0]["label"] == "espresso"
    assert len(answer["predictions"]) == 3


def test_tab_reaches_every_control_in_visual_order(visit):
    page = visit("keyed", key="route").page
    classify_coffee(page)
    weight(page, "v1").fill("5")
    # Tab continues from the start of the page.
    page.evaluate(
        "document.body.tabIndex = -1; document.body.focus(); document.body.removeAttribute('tabindex')"
    )

    controls = ["Skip to the image", "access-name", "drop", "coffee", "chelsea"]
    controls += ["variant", "route-key", "top-k", "again", "Copy the request id", "Copy the command", "curl"]
    controls += ["compare-all", "weight-v1", "weight-v2", "apply", "reset"]
    controls += ["Start a rollout of v1", "Start a rollout of v2", "API", "OpenAPI", "Readiness"]
    assert tabbed(page) == controls


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_is_readable_and_fits_a_phone(visit, scheme):
    page = visit("keyed", viewport=PHONE, key="route", color_scheme=scheme).page
    width = "document.documentElement.scrollWidth"
    widths = [page.evaluate(width)]
    classify_coffee(page)
    page.get_by_role("button", name="Classify with every variant").click()
    sync_api.expect(page.locator("#agreement")).not_to_be_empty()
    page.locator("#access-name").click()
    texts, widths = page.evaluate(CONTRASTS), [*widths, page.evaluate(width)]
    table = page.locator(".scroll").evaluate("each => each.scrollWidth <= each.clientWidth")
    page.keyboard.press("Escape")
    upload(page, NOTES)
    sync_api.expect(page.locator("#error .code-name")).to_be_visible()
    texts += page.evaluate(CONTRASTS)
    other = visit("tasks", viewport=PHONE, color_scheme=scheme).page
    read_label(other)
    other.locator(".found li").first.focus()
    texts, widths = texts + other.evaluate(CONTRASTS), [*widths, other.evaluate(width)]

    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == {"light": "rgb(242, 245, 247)", "dark": "rgb(11, 18, 23)"}[scheme]
    assert len(texts) > 130
    assert [(text, round(contrast, 2)) for text, contrast in texts if contrast < 4.5] == []
    assert (widths, table) == ([PHONE["width"]] * 3, True)


def test_another_model_is_chosen(visit):
    page = visit("several").page
    field = page.locator("#model")
    sync_api.expect(field.locator("option")).to_have_text(["classify", "classify_v2"])
    classify_coffee(page)

    field.select_option("classify_v2")

    sync_api.expect(page.locator("#answer .source")).to_have_text("classify_v2 answered, without a route.")
    assert "/v1/models/classify_v2/predict" in page.locator("#curl").inner_text()
    sync_api.expect(page.locator("#weights-why")).to_contain_text("does not control a route 'classify_v2'")
    sync_api.expect(page.locator("#compare-why")).to_contain_text("Not available: ")
    assert page.locator("#compare-all").is_disabled()
    field.select_option("classify")
    sync_api.expect(page.locator("#answer .source")).to_contain_text("selected by weight")


def test_switch_shows_nothing_of_the_other_model(visit):
    """Both have a variant v1. Nothing stays, also if all requests are under way, and nothing appears late."""
    page = visit("tasks").page
    held: list[sync_api.Route] = []
    read_label(page)
    note = page.locator("#weights .note")
    sync_api.expect(note).to_have_text("read_text_v1, version 1")
    page.route(re.compile("/models/read_text/(read|route)$"), lambda route: held.append(route))
    page.locator("#again").click()
    while {route.request.url.rpartition("/")[2] for route in held} != {"read", "route"}:
        page.wait_for_timeout(100)

    page.get_by_role("tab", name="Read a waybill").click()

    assert "read_text" not in page.locator("body").inner_text()
    for route in held:
        route.continue_()
    sync_api.expect(note).to_have_text("read_waybill_v1, version 1")
    expect_busy(page, "false")
    assert "read_text" not in page.locator("body").inner_text()


def turned() -> bytes:
    """Return the label as a file that its EXIF data turn by a quarter, clockwise."""
    return save(Image.open(io.BytesIO(LABEL)).rotate(90, expand=True), "JPEG", exif=exif(6), quality=95)


@pytest.mark.parametrize("image", [LABEL, turned()], ids=["upright", "turned"])
def test_lines_are_shown_with_their_boxes(visit, image):
    page = visit("tasks").page

    read_label(page, image)

    items = page.locator(".found li")
    assert [items.nth(index).locator("span").first.inner_text() for index in range(3)] == WORDS
    sync_api.expect(page.locator(".boxes polygon")).to_have_count(3)
    picture = page.locator(".boxes img").bounding_box()
    assert picture["width"] / picture["height"] == pytest.approx(900 / 500, rel=0.01)
    left, top, right, bottom = page.evaluate(CORNERS)
    assert left * 900 == pytest.approx(60, abs=15)
    assert 20 < top * 500 < 70
    assert 300 < (right - left) * 900 < 600
    assert 30 < (bottom - top) * 500 < 100
    sync_api.expect(page.locator("#answer .source")).to_contain_text("v1 answered, selected by weight")
    assert "/v1/models/read_text/read" in page.locator("#curl").inner_text()
    with page.expect_download() as download:
        page.get_by_role("button", name="Searchable PDF").click()
    assert download.value.path().read_bytes().startswith(b"%PDF-")
    assert page.evaluate("violations") == []
    upload(page, {**FILE, "buffer": BLANK})
    sync_api.expect(page.locator("#verdict")).to_have_text("No line found.")
    sync_api.expect(page.locator(".boxes polygon")).to_have_count(0)


def test_entry_and_box_highlight_each_other(visit):
    page = visit("tasks").page
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
    page = visit("tasks").page
    page.get_by_role("tab", name="Read a waybill").click()

    upload(page, {**FILE, "buffer": LABEL})

    sync_api.expect(page.locator("#verdict")).to_contain_text("fields found")
    fields = page.get_by_role("listbox", name="Fields").get_by_role("option")
    number = fields.filter(has_text="tracking_number")
    sync_api.expect(number.locator("strong")).to_have_text(WORDS[1])
    sync_api.expect(number.locator(".badge")).to_have_text("checksum right")
    sync_api.expect(number.locator("small").last).to_contain_text("EMS, checksum")
    number.hover()
    assert number.evaluate("each => each.classList.contains('lit')")
    lit = page.locator(".boxes polygon.lit")
    assert lit.get_attribute("aria-label") == f"tracking_number: {WORDS[1]}"
    missing = fields.filter(has_text="not found")
    assert missing.count() > 0
    missing.first.hover()
    assert page.locator(".boxes polygon.lit").count() == 0


def test_another_tab_repeats_the_image(visit):
    page = visit("tasks").page
    upload(page, COFFEE)
    expect_verdict(page, "espresso")

    page.get_by_role("tab", name="Read text").press("ArrowLeft")
    page.get_by_role("tab", name="Read text").click()

    sync_api.expect(page.locator(".boxes img")).to_be_visible()
    assert [page.locator(part).is_visible() for part in ("#compare", "#top-k", "#seen")] == [False] * 3
    sync_api.expect(page.locator("#served")).to_contain_text("read_text")
    page.get_by_role("tab", name="Classify").click()
    expect_verdict(page, "espresso")
    assert page.locator("#compare").is_visible()


def test_objects_are_shown_with_their_boxes(visit):
    page = visit("tasks").page
    page.get_by_role("tab", name="Find objects").click()

    upload(page, {"name": "noise.png", "mimeType": "image/png", "buffer": PHOTO})

    sync_api.expect(page.locator("#verdict")).to_have_text(f"{len(KNOWN)} objects")
    labels = page.locator(".found li span:first-child").all_inner_texts()
    assert labels == [CLASSES[index] for _, _, index in KNOWN]
    picture = page.locator(".boxes img").bounding_box()
    assert picture["height"] == pytest.approx(picture["width"], abs=1)
    # The outline of a box adds a pixel on each side.
    corners = [side / SIDE for side in KNOWN[0][0]]
    assert page.evaluate(CORNERS) == pytest.approx(corners, abs=3 / picture["width"])


def test_embedding_is_shown_as_a_plot(visit):
    page = visit("tasks").page
    page.get_by_role("tab", name="Embed").click()

    upload(page, COFFEE)

    sync_api.expect(page.locator("#verdict")).to_have_text(f"{DIMS} dimensions")
    plot = page.get_by_role("img", name=f"{DIMS} components")
    assert plot.bounding_box()["height"] == pytest.approx(96, abs=1)
    assert plot.locator("path").get_attribute("d").count("M") == DIMS


def test_tabs_are_those_of_the_models(visit):
    page = visit("text").page
    sync_api.expect(page.locator("#image-title")).to_have_text("Read text")

    page.get_by_role("button", name="parcel label").click()

    sync_api.expect(page.locator("#verdict")).to_contain_text("lines")
    assert page.locator(".sample").count() == 1
    assert page.locator("#tasks button").all_inner_texts() == ["Read text", "Read a waybill"]
    sync_api.expect(page.locator("#connection")).to_have_text("live")


def test_page_says_that_the_server_is_down(browser):
    """The gateway still answers, but the page does not call that live; it recovers without a reload."""
    upstream = Upstream()
    page = browser.new_context(viewport=DESK).new_page()
    state, message = page.locator("#connection"), page.locator("#live-message")

    with listening(create_app(in_front_of(upstream))) as origin:
        page.goto(origin)
        sync_api.expect(state).to_have_text("live")
        upstream.outcome = Unreachable("127.0.0.1:8000: connection refused")
        sync_api.expect(state).to_have_text("model not ready")
        sync_api.expect(message).to_contain_text("the server behind the gateway cannot be reached")
        upstream.outcome = PREDICTION
        sync_api.expect(state).to_have_text("live")
        sync_api.expect(message).to_be_hidden()
        page.context.close()
