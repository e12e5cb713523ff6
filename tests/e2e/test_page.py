"""The gateway's page in a real browser, against the real gateway and the real server.

`SCREENSHOTS=docs pytest tests/e2e/test_page.py -m slow -k pictures` writes the pictures that the docs show.
"""

import io
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from PIL import Image

from nereid.assets import CHELSEA, COFFEE, REPOSITORY
from nereid.cli.route_commands.gateway_route import RepositoryModels
from nereid.gateway.admission import keys
from nereid.gateway.admission.keys import KeyRing
from nereid.gateway.http.app import create_app, create_gateway
from nereid.gateway.models import FixedModels
from nereid.gateway.settings import Settings
from nereid.rollout import orders, service
from nereid.routes.target import find_route
from nereid.server.command_line import ServerOptions
from nereid.server.embedded_server import EmbeddedServer
from nereid.server.ports import Ports, free_ports
from nereid.server.run_dir import ServerRecord
from tests.e2e.conftest import url
from tests.webpage import CONTRASTS, DESK, PHONE, VIOLATIONS, WATCHDOG_S, listening, running_browser, upload

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: extra dev")
pytestmark = pytest.mark.slow

MAX_PICTURE_BYTES, MAX_PHONE_PX = 280_000, 1_180
# The route reports its counts every half second.
METRICS_MS = 3_000
MAX_PAGE_BYTES = 80_000
TRAFFIC = """async (secret) => {
  const body = await (await fetch("samples/coffee.jpg")).blob();
  const headers = {Authorization: `Bearer ${secret}`, "Content-Type": body.type};
  const send = async () => {
    await fetch("predict", {method: "POST", body, headers});
    setTimeout(send, 70 + 40 * Math.sin(performance.now() / 4000));
  };
  send();
}"""


@dataclass(frozen=True, slots=True)
class Gateway:
    """A running gateway: its origin, its route file, and the secrets of its keys by name."""

    origin: str
    route_file: Path
    secrets: dict[str, str]

    def weights(self) -> dict[str, float]:
        """Return the weights in the route file."""
        variants = json.loads(self.route_file.read_text())["variants"]
        return {variant["name"]: variant["weight"] for variant in variants}


@dataclass(slots=True)
class Seen:
    """The activity of a page: requested URLs, console messages, and violations of its policy."""

    page: "sync_api.Page"
    requests: list[str] = field(default_factory=list)
    console: list[str] = field(default_factory=list)

    def violations(self) -> list[str]:
        """Return the violations of the Content-Security-Policy."""
        return self.page.evaluate("violations")


@pytest.fixture(scope="module")
def gateways(tmp_path_factory):
    """Gateways of one server, by name.

    `keyed` requires keys; `open` has none; `plain` has no route either; `several` offers two models.
    """
    base = tmp_path_factory.mktemp("page")
    repository = shutil.copytree(
        REPOSITORY, base / "repository", ignore=shutil.ignore_patterns("*.history.jsonl")
    )
    key_file = base / "keys.json"
    secrets = store_keys(key_file)
    options = ServerOptions(repository, "cpu", ports=Ports(*free_ports(3)))
    with EmbeddedServer(options, base, os.environ) as server, ExitStack() as stack:
        record = ServerRecord(server.pid, options.host, options.ports, str(repository), "cpu", "")
        models = RepositoryModels(repository, lambda: record)
        several = RepositoryModels(repository, lambda: record, ["classify", "classify_v2"])
        settings = Settings(url=url(server, "http"))
        apps = {
            "keyed": create_app(
                create_gateway(replace(settings, keys_needed=True), KeyRing(key_file), models)
            ),
            "open": create_app(create_gateway(settings, KeyRing(), models)),
            "plain": create_app(create_gateway(settings, KeyRing(), FixedModels(("classify",)))),
            "several": create_app(create_gateway(settings, KeyRing(), several)),
        }
        yield {
            name: Gateway(stack.enter_context(listening(app)), repository / "classify.route.json", secrets)
            for name, app in apps.items()
        }


def store_keys(path: Path) -> dict[str, str]:
    """Store three keys, with scope `infer`, with scope `route`, and with a low rate; return their secrets."""
    wanted = {"infer": ({"infer"}, None), "route": ({"infer", "route"}, None), "slow": ({"infer"}, 0.1)}
    made = {
        name: keys.make(name, frozenset(scopes), datetime.now(UTC), rate_per_s)
        for name, (scopes, rate_per_s) in wanted.items()
    }
    path.write_bytes(keys.format_keys(keys.KeyFile(tuple(key for key, _ in made.values()))))
    path.chmod(0o600)
    return {name: secret for name, (_, secret) in made.items()}


@pytest.fixture(scope="module")
def browser():
    """A headless browser."""
    with running_browser() as running:
        yield running


@pytest.fixture
def visit(browser, gateways) -> Iterator[Callable]:
    """Open a gateway's page in a new profile: `visit("keyed", key="infer")` signs in, too."""
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
    """Enter a key as a user."""
    page.get_by_text("Key", exact=True).click()
    page.get_by_label("API key").fill(secret)
    page.get_by_role("button", name="Sign in").click()
    sync_api.expect(page.locator("#access-name")).to_contain_text("Key: ")
    page.keyboard.press("Escape")


def classify_coffee(page) -> None:
    """Upload the photo of a coffee, and wait for its class."""
    upload(page, COFFEE)
    expect_verdict(page, "espresso")


def compare(page) -> None:
    """Classify with every variant, and wait for the comparison."""
    page.get_by_role("button", name="Classify with every variant").click()
    sync_api.expect(page.locator("#agreement")).not_to_be_empty()


def weight(page, variant: str):
    """Return the input of a variant's weight."""
    return page.get_by_role("spinbutton", name=variant)


def expect_verdict(page, text: str) -> None:
    """Wait until the best class is `text`."""
    sync_api.expect(page.locator("#verdict strong")).to_have_text(text)


def expect_busy(page, is_busy: str) -> None:
    """Wait until a request is pending, or until none is."""
    sync_api.expect(page.locator("#result")).to_have_attribute("aria-busy", is_busy)


def expect_message(page, text: str) -> None:
    """Wait for a message about the weights."""
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


def test_page_is_small(root):
    """The files of the page have fewer bytes than the limit."""
    files = [path for path in (root / "nereid/gateway/page").iterdir() if path.is_file()]

    assert sum(path.stat().st_size for path in files) < MAX_PAGE_BYTES


def test_upload_puts_espresso_on_top_with_its_bar_and_variant(visit):
    """The page shows an uploaded photo with five classes, variant, reason and timings."""
    page = visit("open").page

    upload(page, COFFEE)

    expect_verdict(page, "espresso")
    rows = page.locator("#answer .bars li")
    assert rows.count() == 5
    assert rows.first.locator(".label").inner_text() == "espresso"
    share = float(rows.first.locator(".score").inner_text().removesuffix("\u00a0%"))
    assert share == pytest.approx(95, abs=1)  # 95.3 with FP32, slightly different with INT8
    drawn = rows.first.locator(".fill").bounding_box()["width"]
    assert drawn / rows.first.locator(".track").bounding_box()["width"] == pytest.approx(
        share / 100, abs=0.01
    )
    assert page.locator("#answer .source").inner_text() in {
        f"{name} answered, selected by weight." for name in ("v1", "v2")
    }
    stages = page.locator("#answer .stack").get_attribute("aria-label")
    assert "receive" in stages
    assert "inference" in stages
    assert page.locator("#thumbnail").evaluate("image => image.naturalWidth") == 600


def test_sample_is_picked_with_the_keyboard_alone(visit):
    """Tab reaches a sample, and Enter classifies it."""
    page = visit("open").page
    sync_api.expect(page.locator(".sample")).to_have_count(2)

    assert tabbed(page, lambda name: name == "coffee")[-1] == "coffee"
    page.keyboard.press("Enter")

    expect_verdict(page, "espresso")


@pytest.mark.parametrize("key", ["Enter", "Space"])
def test_drop_zone_opens_the_file_dialog_with_a_key(visit, key):
    """Enter and Space on the drop zone open the dialog."""
    page = visit("open").page
    tabbed(page, lambda name: name == "drop")

    with page.expect_file_chooser() as chooser:
        page.keyboard.press(key)
    chooser.value.set_files(COFFEE)

    expect_verdict(page, "espresso")


def test_image_is_pasted(visit):
    """Ctrl+V classifies an image from the clipboard; text is pasted as usual."""
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
    """A file dropped outside the drop zone is classified, and does not replace the page."""
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


def test_text_file_is_refused_with_the_expected_format(visit, tmp_path):
    """The page shows the gateway's error: code, message and request id."""
    page = visit("open").page
    classify_coffee(page)
    (tmp_path / "notes.txt").write_text("this is not an image")

    upload(page, tmp_path / "notes.txt")

    error = page.locator("#error")
    sync_api.expect(error.locator(".code-name")).to_have_text("invalid_image")
    sync_api.expect(error).to_contain_text("JPEG")
    sync_api.expect(error).to_contain_text("request")
    assert error.get_attribute("role") == "alert"
    assert page.locator("#answer").inner_text() == ""


def test_file_name_is_text(visit):
    """A file name with HTML is shown as text."""
    page = visit("open").page
    name = "<img src=x onerror=document.title='taken'>.jpg"

    upload(page, {"name": name, "mimeType": "image/jpeg", "buffer": COFFEE.read_bytes()})

    expect_verdict(page, "espresso")
    assert page.locator("#drop-label").inner_text() == name
    assert (page.title(), page.locator("#drop-label img").count()) == ("Nereid", 0)


def test_new_image_cancels_the_previous_request(visit):
    """The result on the page belongs to the image on the page."""
    page = visit("open").page
    held, failed = [], []
    page.route("**/predict*", lambda route: route.continue_() if held else held.append(route))
    page.on("requestfailed", lambda request: failed.append(request.failure))

    upload(page, CHELSEA)
    expect_busy(page, "true")
    upload(page, COFFEE)

    expect_verdict(page, "espresso")
    assert failed == ["net::ERR_ABORTED"]


def test_comparison_uses_every_variant(visit):
    """Each variant classifies three times in its own column, and the page shows their agreement."""
    seen = visit("open")
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
    assert (
        page.locator("#compare-unit").inner_text()
        == "Small figures: difference from v1 in percentage points."
    )


def test_comparison_without_a_route_has_a_reason(visit):
    """Without a route the button is disabled, and the page shows the reason."""
    page = visit("plain").page
    classify_coffee(page)

    assert page.locator("#compare-all").is_disabled()
    sync_api.expect(page.locator("#compare-why")).to_contain_text("Not available: ")


def test_live_panel_shows_traffic_and_breakers(visit):
    """The panel shows rates, latencies and breakers of the variants within seconds."""
    page = visit("open").page
    upload(page, COFFEE)
    page.get_by_role("button", name="Classify with every variant").click()

    sync_api.expect(page.locator("#connection")).to_have_text("live")
    for name in ("v1", "v2"):
        row = page.locator("#variants tr").filter(has_text=name)
        sync_api.expect(row.locator(".badge")).to_have_text("answers")
        sync_api.expect(row.locator("td").last).not_to_have_text("–")
    sync_api.expect(page.locator("#outcomes")).to_contain_text("ok ")
    assert page.locator("#charts svg[role=img]").count() == 2


def test_lost_connection_is_shown_and_restored(visit):
    """The panel reports a lost connection, polls less often, and recovers without a reload."""
    page = visit("open").page
    sync_api.expect(page.locator("#connection")).to_have_text("live")

    page.context.set_offline(True)
    sync_api.expect(page.locator("#connection")).to_contain_text("no connection, next try in 2 s")
    upload(page, COFFEE)
    sync_api.expect(page.locator("#error .code-name")).to_have_text("no_connection")
    page.context.set_offline(False)

    sync_api.expect(page.locator("#connection")).to_have_text("live")


def test_hidden_page_sends_no_requests(visit):
    """A hidden page sends no requests; a visible page resumes immediately."""
    seen = visit("open")
    hide = "value => { Object.defineProperty(document, 'hidden', {value, configurable: true}); "
    hide += "document.dispatchEvent(new Event('visibilitychange')); }"
    sync_api.expect(seen.page.locator("#connection")).to_have_text("live")

    seen.page.evaluate(hide, True)
    sync_api.expect(seen.page.locator("#connection")).to_have_text("paused")
    seen.page.wait_for_timeout(300)
    before = len(seen.requests)
    seen.page.wait_for_timeout(1200)

    assert len(seen.requests) == before
    seen.page.evaluate(hide, False)
    sync_api.expect(seen.page.locator("#connection")).to_have_text("live")


def test_page_without_a_key_does_not_poll(visit):
    """Without a key the page does not poll a gateway that requires keys; an unknown key is not stored."""
    seen = visit("keyed")
    page = seen.page
    sync_api.expect(page.locator("#connection")).to_have_text("key needed")
    assert not any("/v1/live" in address or "/v1/route" in address for address in seen.requests)

    upload(page, COFFEE)
    sync_api.expect(page.locator("#error .code-name")).to_have_text("unauthenticated")
    page.get_by_text("Key", exact=True).click()
    page.get_by_label("API key").fill("nereid_of-somebody-else")
    page.get_by_role("button", name="Sign in").click()

    sync_api.expect(page.locator("#access-message")).to_have_text("Unknown key.")
    assert page.evaluate("sessionStorage.length") == 0


def test_key_stays_in_its_tab(visit, gateways):
    """The key is only in the tab's storage, and is removed after signing out."""
    page = visit("keyed", key="route").page
    secret = gateways["keyed"].secrets["route"]
    classify_coffee(page)

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
    """Applied weights are in the route file, are served, and are shown on the page."""
    page = visit("keyed", key="route").page
    weight(page, "v1").fill("30")
    weight(page, "v2").fill("70")
    sync_api.expect(page.locator("#weights output")).to_have_text(["30.0\u00a0%", "70.0\u00a0%"])

    page.get_by_role("button", name="Apply").click()

    expect_message(page, "is served.")
    assert gateways["keyed"].weights() == {"v1": 30, "v2": 70}
    row = page.locator("#variants tr").filter(has_text="v2")
    sync_api.expect(row.locator(".share")).to_contain_text("70.0\u00a0%")
    sync_api.expect(page.get_by_role("button", name="Apply")).to_be_disabled()


@pytest.mark.parametrize(
    ("v1", "v2", "message"),
    [
        ("0", "0", "At least one weight must be above 0."),
        ("-1", "2", "A weight must be a number of at least 0."),
    ],
    ids=["all zero", "negative"],
)
def test_invalid_weights_are_not_sent(visit, v1, v2, message):
    """The page shows the error without a request."""
    page = visit("keyed", key="route").page

    weight(page, "v1").fill(v1)
    weight(page, "v2").fill(v2)

    expect_message(page, message)
    assert page.get_by_role("button", name="Apply").is_disabled()


def test_rollout_is_started_paused_and_aborted(visit, gateways):
    """The panel has the state in words, and the orders that it allows; a second page sees them, too."""
    page = visit("keyed", key="route").page
    weight(page, "v1").fill("100")
    weight(page, "v2").fill("0")
    page.get_by_role("button", name="Apply").click()
    expect_message(page, "is served.")
    classify_coffee(page)
    page.wait_for_timeout(METRICS_MS)  # the rollout needs the median of the control
    text, message = page.locator("#rollout-text"), page.locator("#rollout-message")
    repository = gateways["keyed"].route_file.parent

    page.get_by_role("button", name="Start a rollout of v2").click()
    sync_api.expect(message).to_contain_text("no controller runs")
    # This controller finds no server, so it waits.
    with service.in_background(repository, lambda: None, print):
        assert orders.wait_controlled(find_route(repository))
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
    weight(page, "v1").fill("50")
    weight(page, "v2").fill("50")
    page.get_by_role("button", name="Apply").click()
    expect_message(page, "is served.")


@pytest.mark.parametrize("name", ["open", "keyed"])
def test_weights_are_closed_without_the_scope(visit, name):
    """Without the scope `route` the weights are disabled, and the page names the command for a key."""
    page = visit(name, key="infer" if name == "keyed" else "").page

    sync_api.expect(page.locator("#weights-why")).to_contain_text("nereid key add NAME --scope route")
    assert weight(page, "v1").is_disabled()
    assert page.get_by_role("button", name="Apply").is_disabled()


def test_change_by_another_user_is_shown(visit, gateways):
    """Edits of an old generation cause a warning, are rejected, and give way to the present weights."""
    page = visit("keyed", key="route").page
    weight(page, "v1").fill("12")
    other = visit("keyed", key="route").page
    weight(other, "v1").fill("44")
    weight(other, "v2").fill("56")
    other.get_by_role("button", name="Apply").click()
    expect_message(other, "is served.")
    sync_api.expect(page.locator("#route-detail")).to_contain_text("Another user has changed the route")
    assert weight(page, "v1").input_value() == "12"

    page.get_by_role("button", name="Apply").click()

    expect_message(page, "yours were not applied")
    assert weight(page, "v1").input_value() == "44"
    assert gateways["keyed"].weights() == {"v1": 44, "v2": 56}


def test_rate_limit_is_shown_with_the_retry_time(visit):
    """A rejection because of the rate shows the seconds of `Retry-After`."""
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
    """The curl command returns the same result, and does not contain the key."""
    page = visit("keyed", key="infer").page
    photo = shutil.copy(COFFEE, tmp_path / "it's a cup.jpg")
    page.locator("#variant").select_option("v2")
    page.locator("#top-k").fill("3")
    upload(page, photo)
    expect_verdict(page, "espresso")
    line = page.locator("#curl").text_content()

    environment = os.environ | {"NEREID_KEY": gateways["keyed"].secrets["infer"]}
    done = subprocess.run(
        ["sh", "-c", line], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=WATCHDOG_S
    )

    answer = json.loads(done.stdout)
    assert [answer["variant"], answer["reason"], answer["predictions"][0]["label"]] == [
        "v2",
        "variant",
        "espresso",
    ]
    assert len(answer["predictions"]) == 3


def test_page_sends_requests_to_its_own_origin_only(visit, gateways):
    """All requests go to the gateway, the policy blocks nothing, and the console stays empty."""
    seen = visit("keyed", key="route")
    page = seen.page
    policy = page.request.get(gateways["keyed"].origin).headers["content-security-policy"]
    page.locator(".sample").first.click()
    expect_verdict(page, "espresso")
    compare(page)
    page.locator("#charts svg").first.hover()
    page.wait_for_timeout(1000)

    own = (f"{gateways['keyed'].origin}/", f"blob:{gateways['keyed'].origin}/")
    assert [address for address in seen.requests if not address.startswith(own)] == []
    assert len(seen.requests) > 15
    assert "default-src 'none'" in policy
    assert (seen.violations(), seen.console) == ([], [])


def test_tab_reaches_every_control_in_visual_order(visit):
    """The keyboard reaches every control from top to bottom."""
    page = visit("keyed", key="route").page
    classify_coffee(page)
    weight(page, "v1").fill("5")
    # Tab continues from the start of the page.
    page.evaluate(
        "document.body.tabIndex = -1; document.body.focus(); document.body.removeAttribute('tabindex')"
    )

    assert tabbed(page) == [
        "Skip to the image",
        "access-name",
        "drop",
        "coffee",
        "chelsea",
        "variant",
        "route-key",
        "top-k",
        "again",
        "Copy the request id",
        "Copy the command",
        "curl",
        "compare-all",
        "weight-v1",
        "weight-v2",
        "apply",
        "reset",
        "Start a rollout of v1",
        "Start a rollout of v2",
        "API",
        "OpenAPI",
        "Readiness",
    ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable(visit, scheme, tmp_path):
    """Every text, also of results and errors, has a contrast of at least 4.5:1 to its background."""
    page = visit("keyed", key="infer", color_scheme=scheme).page
    classify_coffee(page)
    compare(page)
    page.locator("#access-name").click()
    texts = page.evaluate(CONTRASTS)
    (tmp_path / "notes.txt").write_text("this is not an image")
    upload(page, tmp_path / "notes.txt")
    sync_api.expect(page.locator("#error .code-name")).to_be_visible()
    texts += page.evaluate(CONTRASTS)

    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == {"light": "rgb(242, 245, 247)", "dark": "rgb(11, 18, 23)"}[scheme]
    assert len(texts) > 100
    assert [(text, round(contrast, 2)) for text, contrast in texts if contrast < 4.5] == []


def test_phone_needs_no_sideways_scrolling(visit, gateways):
    """At 360 px the page fits the width: empty, signed in, with a result and a comparison."""
    page = visit("keyed", viewport=PHONE).page
    width = "document.documentElement.scrollWidth"
    widths = [page.evaluate(width)]
    sign_in(page, gateways["keyed"].secrets["route"])
    classify_coffee(page)
    compare(page)
    page.locator("#access-name").click()
    widths.append(page.evaluate(width))

    assert widths == [PHONE["width"]] * 2
    table = page.locator(".scroll")
    assert table.evaluate("each => each.scrollWidth <= each.clientWidth")


def test_pictures_are_small(visit, gateways, tmp_path):
    """Screenshots in light, dark and phone layout are below a size limit; `SCREENSHOTS` sets their folder."""
    folder, is_kept = Path(os.environ.get("SCREENSHOTS", tmp_path)), "SCREENSHOTS" in os.environ
    secret = gateways["keyed"].secrets["route"]
    looks = {
        "light": {"color_scheme": "light"},
        "dark": {"color_scheme": "dark"},
        "phone": {"color_scheme": "light", "viewport": PHONE},
    }
    if is_kept:
        busy = visit("keyed").page
        busy.evaluate(TRAFFIC, secret)
        busy.wait_for_timeout(60_000)

    for name, look in looks.items():
        page = visit("keyed", key="route", **look).page
        upload(page, COFFEE)
        # The pictures should not show the load of a page start.
        page.wait_for_timeout(3000 * is_kept)
        page.locator("#again").click()
        expect_busy(page, "false")
        page.get_by_role("button", name="Classify with every variant").click()
        sync_api.expect(page.locator("#compare-unit")).not_to_be_empty()
        page.mouse.move(0, 0)
        page.wait_for_timeout(3000 * is_kept)
        picture = Image.open(io.BytesIO(page.screenshot(full_page=True, animations="disabled"))).convert(
            "RGB"
        )
        # Six bits a colour: no visible difference, and a quarter smaller.
        picture = picture.point(lambda value: (value >> 2) * 255 // 63)
        picture = picture.convert("RGB")
        if name == "phone":
            picture = picture.crop((0, 0, PHONE["width"], MAX_PHONE_PX))
        picture.save(folder / f"page-{name}.png", optimize=True)

    sizes = {path.name: path.stat().st_size for path in folder.glob("page-*.png")}
    assert {*sizes} == {f"page-{name}.png" for name in looks}
    assert max(sizes.values()) < MAX_PICTURE_BYTES


def test_another_model_is_chosen(visit):
    """The image is classified again by that model, and the panels show it."""
    page = visit("several").page
    field = page.locator("#model")
    sync_api.expect(field.locator("option")).to_have_text(["classify", "classify_v2"])
    classify_coffee(page)

    field.select_option("classify_v2")

    sync_api.expect(page.locator("#answer .source")).to_have_text("classify_v2 answered, without a route.")
    assert "/v1/models/classify_v2/predict" in page.locator("#curl").inner_text()
    sync_api.expect(page.locator("#weights-why")).to_contain_text("does not control a route 'classify_v2'")
    sync_api.expect(page.locator("#variants th")).to_have_text("the model ")
    field.select_option("classify")
    sync_api.expect(page.locator("#answer .source")).to_contain_text("selected by weight")


def test_one_model_needs_no_choice(visit):
    """The field appears only where it has a use."""
    page = visit("open").page
    sync_api.expect(page.locator("#served")).to_have_text("classify")

    assert not page.locator("#model").is_visible()


def test_picture_shows_the_input_of_the_network(visit):
    """The picture has the network's size; without the repository there is none."""
    page, plain = visit("open").page, visit("plain").page

    classify_coffee(page)
    classify_coffee(plain)

    sync_api.expect(page.locator("#seen")).to_be_visible()
    assert page.locator("#seen-image").evaluate("image => [image.naturalWidth, image.naturalHeight]") == [
        224,
        224,
    ]
    assert not plain.locator("#seen").is_visible()


def test_request_rejected_for_its_key_is_repeated_after_signing_in(visit, gateways):
    """The old error goes away with its cause."""
    page = visit("keyed").page
    upload(page, COFFEE)
    sync_api.expect(page.locator("#error .code-name")).to_have_text("unauthenticated")

    sign_in(page, gateways["keyed"].secrets["infer"])

    expect_verdict(page, "espresso")
    sync_api.expect(page.locator("#error")).to_be_empty()


def test_words_are_those_of_people(visit):
    """The state of a variant is not called by the state of a switch."""
    page = visit("open").page
    classify_coffee(page)

    assert page.get_by_label("Classes shown").input_value() == "5"
    badges = page.locator("#variants .badge")
    sync_api.expect(badges.first).to_be_visible()
    assert {*badges.all_inner_texts()} <= {"answers", "no requests yet"}


def test_page_says_that_the_server_is_down(browser, tmp_path):
    """The gateway still answers, but the page does not call that live; it recovers without a reload."""
    options = ServerOptions(REPOSITORY, "cpu", ports=Ports(*free_ports(3)))
    app = create_app(
        create_gateway(Settings(url=f"127.0.0.1:{options.ports.http}"), KeyRing(), FixedModels(("classify",)))
    )
    context = browser.new_context(viewport=DESK)
    page = context.new_page()
    state, message = page.locator("#connection"), page.locator("#live-message")
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()

    with listening(app) as origin:
        with EmbeddedServer(options, folders[0], os.environ):
            page.goto(origin)
            sync_api.expect(state).to_have_text("live")
        sync_api.expect(state).to_have_text("model not ready")
        sync_api.expect(message).to_contain_text("the server behind the gateway cannot be reached")
        with EmbeddedServer(options, folders[1], os.environ):
            sync_api.expect(state).to_have_text("live")
            sync_api.expect(message).to_be_hidden()
        context.close()
