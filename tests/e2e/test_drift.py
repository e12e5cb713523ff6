"""Drift on the real server: references of real photos, and copies as of a broken camera."""

import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.resources import files
from itertools import cycle, islice
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageFilter

from nereid.backends.routing.reference_file import path_of, read_reference
from nereid.base.assets import REPOSITORY
from nereid.base.prometheus_text import MetricSamples
from nereid.insight.drift import recording
from nereid.insight.drift.comparison import VariantDrift
from nereid.insight.drift.monitor import Monitor
from nereid.insight.drift.recording import CLASSES_DELAY_S, series_counts
from nereid.server import run_dir
from nereid.tasks.classify.client import Classifier
from tests.pictures import save
from tests.routes import wait_until
from tests.supervised import Served, gateway_of, serving

pytestmark = pytest.mark.nightly(minutes=3)  # the references need a minute of traffic

# Those of a classifier, which counts no lines or objects.
SIGNALS = {*recording.SIGNALS} - {"found"}
GAUGES = ("window_requests", "reference_age_seconds")
ROUTE, PHOTOS, SENT = "classify", 320, 260
Change = Callable[[Image.Image], Image.Image]
# All photos in these packages, without charts, silhouettes and pages of text.
PACKAGED = {
    "skimage": (
        *("data/astronaut.png", "data/brick.png", "data/camera.png", "data/chelsea.png", "data/coffee.png"),
        *("data/coins.png", "data/grass.png", "data/gravel.png", "data/hubble_deep_field.jpg"),
        *("data/ihc.png", "data/moon.png", "data/motorcycle_left.png", "data/retina.jpg", "data/rocket.jpg"),
    ),
    "sklearn": ("datasets/images/china.jpg", "datasets/images/flower.jpg"),
    "matplotlib": ("mpl-data/sample_data/grace_hopper.jpg",),
}
# Sides of the crops, as parts of the photo's own sides.
MIN_PART, MAX_PART, MAX_SIDE_PX = 0.45, 1.0, 640


def jpeg(photo: Image.Image) -> bytes:
    return save(photo, "JPEG", quality=90)


def crops(count: int) -> list[Image.Image]:
    """Return distinct crops of the photos of three packages, in turn; each is a photo of its own size."""
    rng = np.random.default_rng(1)
    paths = [str(files(package) / name) for package, names in PACKAGED.items() for name in names]
    photos = [Image.open(path).convert("RGB") for path in paths]
    for photo in photos:
        photo.thumbnail((1280, 1280))
    return [_crop(photo, rng) for photo in islice(cycle(photos), count)]


def _crop(photo: Image.Image, rng: np.random.Generator) -> Image.Image:
    width, height = (max(64, int(side * rng.uniform(MIN_PART, MAX_PART))) for side in photo.size)
    left = int(rng.integers(0, photo.width - width + 1))
    top = int(rng.integers(0, photo.height - height + 1))
    part = photo.crop((left, top, left + width, top + height))
    part.thumbnail((MAX_SIDE_PX, MAX_SIDE_PX))
    part = ImageEnhance.Brightness(part).enhance(rng.uniform(0.85, 1.15))
    return part.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if rng.random() < 0.5 else part


def dark(photo: Image.Image) -> Image.Image:
    return ImageEnhance.Brightness(photo).enhance(0.4)


def _strip(photo: Image.Image) -> Image.Image:
    return photo.crop((photo.width // 3, 0, 2 * photo.width // 3, photo.height))


def _other_camera(photo: Image.Image) -> Image.Image:
    """Return a photo with the white balance of another camera: more red, less blue."""
    red, green, blue = photo.split()
    warmer = red.point(lambda level: level * 1.25), green, blue.point(lambda level: level * 0.8)
    return Image.merge("RGB", warmer)


# What happens to the photos, and the signal that must show it.
DEGRADED: dict[str, tuple[Change, str]] = {
    "dark": (dark, "brightness"),
    "blurred": (lambda photo: photo.filter(ImageFilter.GaussianBlur(max(photo.size) / 100)), "sharpness"),
    "cropped": (_strip, "aspect"),
    "another camera": (_other_camera, "warmth"),
}


class World:
    """A running `nereid serve` of a copied repository, with photos and a reference of them."""

    def __init__(self, served: Served, base: Path) -> None:
        self.served, self.base = served, base
        self.repository = served.repository
        self.photos = crops(PHOTOS)
        self.log: list[str] = []

    @property
    def folder(self) -> Path:
        folder = run_dir.find_folder(self.served.base, self.repository)
        assert folder
        return folder

    def monitor(self) -> Monitor:
        made = Monitor(self.repository, lambda: (self.served.server_info, self.folder), self.log.append)
        made.poll()
        return made

    def store_photos(self, bad: int) -> Path:
        folder = self.base / "photos"
        folder.mkdir()
        for number, photo in enumerate(self.photos):
            (folder / f"{number:03}.jpg").write_bytes(jpeg(photo))
        for number in range(bad):
            (folder / f"bad-{number}.jpg").write_bytes(b"not an image")
        return folder

    def send(self, images: Sequence[bytes], variant: str = "v1") -> None:
        before = self.counted(variant)
        address = f"127.0.0.1:{self.served.ports['http']}"
        with Classifier(address, "http", ROUTE) as classifier, ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda image: classifier.classify(image, variant=variant, top_k=1), images))
        for index, count in enumerate(before):
            wait_until(lambda index=index, count=count: self.counted(variant)[index] >= count + len(images))

    def counted(self, variant: str) -> tuple[int, int]:
        counts = series_counts(MetricSamples.parse(self.served.triton_page()))
        version = variant.removeprefix("v")
        model = f"classify_{variant}" if self.served.server_info.profile == "cpu" else "imagenet_preprocess"
        names = (
            recording.route_series(ROUTE, variant, version, "confidence"),
            recording.image_series(model, 1, "megapixels"),
        )
        first, second = (sum(counts.get(name, {}).values()) for name in names)
        return first, second

    def look_at(self, change: Change, seed: int = 5) -> VariantDrift:
        """Send changed copies of a random sample of the photos; return the comparison of their variant."""
        monitor = self.monitor()
        indices = np.random.default_rng(seed).integers(0, PHOTOS, SENT)
        self.send([jpeg(change(self.photos[index])) for index in indices])
        monitor.poll()
        assert monitor.state
        (route,) = monitor.state.routes
        return next(variant for variant in route.variants if variant.variant == "v1")


def over_limit(found: VariantDrift) -> set[str]:
    assert {signal.verdict for signal in found.signals} <= {"ok", "drift"}, found
    assert {signal.signal for signal in found.signals} == SIGNALS
    return {signal.signal for signal in found.signals if signal.verdict == "drift"}


@contextmanager
def serving_world(base: Path, profile: str) -> Iterator[World]:
    repository = base / "models"
    shutil.copytree(REPOSITORY, repository)
    with serving(repository, base / "run", "--profile", profile) as served:
        world = World(served, base)
        done = served.run("drift", "baseline", ROUTE, "--images", str(world.store_photos(bad=2)))
        world.log += done.stderr.splitlines()
        stored = path_of(repository, ROUTE).stat().st_mtime
        wait_until(lambda: time.time() - stored > CLASSES_DELAY_S)  # the route then counts its classes
        yield world


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    with serving_world(tmp_path_factory.mktemp("drift"), "cpu") as running:
        yield running


def test_reference_has_every_variant_and_names_bad_images(world):
    reference = read_reference(path_of(world.repository, ROUTE))

    assert reference
    assert [(entry.name, entry.images) for entry in reference.variants] == [("v1", PHOTOS), ("v2", PHOTOS)]
    for variant in reference.variants:
        assert set(variant.signals) | {"class"} == SIGNALS
        assert {sum(signal.counts) for signal in variant.signals.values()} <= {PHOTOS, PHOTOS - 1}
        assert sum(variant.classes) == PHOTOS
    named = [line for line in world.log if "bad-" in line]
    assert len(named) == 4
    assert all("not an image" in line or "expected an image" in line for line in named)


def test_undisturbed_photos_raise_nothing(world):
    drift = world.look_at(lambda photo: photo)

    assert over_limit(drift) == set()
    assert drift.requests >= SENT


def test_histograms_of_the_page_are_whole(world):
    """Buckets rise up to the count, and all of them exist, as in a histogram of Prometheus."""
    world.look_at(lambda photo: photo)
    page = MetricSamples.parse(world.served.triton_page())
    for signal in SIGNALS - {recording.CLASS}:
        name, by = f"nereid_route_{signal}", ("route", "variant", "version", "model_instance")
        if signal in recording.INPUT_SIGNALS:
            name, by = f"nereid_image_{signal}", ("model", "version")
        histograms = page.sums(f"{name}_count", *by)
        assert histograms
        for key, count in histograms.items():
            labels = dict(zip(by, key, strict=True))
            bounds = [*(f"{bound:g}" for bound in recording.BOUNDS[signal]), "+Inf"]
            buckets = [page.gauge(f"{name}_bucket", labels | {"le": bound}) for bound in bounds]
            assert None not in buckets
            assert buckets == sorted(buckets)
            assert buckets[-1] == count
            assert page.total(f"{name}_sum", labels) > 0


@pytest.mark.parametrize("name", DEGRADED)
def test_degraded_photos_raise_their_signal(world, name):
    change, signal = DEGRADED[name]

    drift = world.look_at(change)

    assert signal in over_limit(drift), drift
    assert any("exceeds its limit" in line for line in world.log)


def test_ensemble_measures_in_its_preprocessing_model(tmp_path_factory):
    with serving_world(tmp_path_factory.mktemp("ensemble"), "ensemble") as world:
        assert over_limit(world.look_at(lambda photo: photo)) == set()
        assert "brightness" in over_limit(world.look_at(dark))


def test_serve_exports_the_gauges_itself(world):
    """`nereid serve` looks by itself: its supervisor's page has the gauges of a route with a reference."""
    lines = [f'nereid_drift_{name}{{route="classify",variant="v1"}} ' for name in GAUGES]
    page = world.served.page
    wait_until(lambda: all(line in page("/metrics")[1] for line in lines), "gauges")


def test_feedback_shows_the_accuracy(world, tmp_path):
    world.monitor().poll()
    image = jpeg(world.photos[0])
    with gateway_of(world.served, tmp_path / "log", "--workers", "2") as ports:
        address = f"http://127.0.0.1:{ports['http']}"
        for number in range(4):
            head = {"Content-Type": "image/jpeg", "X-Request-ID": f"photo-{number}"}
            answer = httpx.post(f"{address}/predict?variant=v1", content=image, headers=head, timeout=30)
            label = answer.json()["predictions"][0]["label"] if number else "none of them"
            truth = {"request_id": f"photo-{number}", "label": label}
            told = httpx.post(f"{address}/v1/feedback", json=truth, timeout=30)
            assert told.json()["correct"] is bool(number)

        shown = json.loads(world.served.run("drift", "show", ROUTE, "--json").stdout)

    (accuracy,) = shown["accuracy"]
    assert (accuracy["variant"], accuracy["answers"], accuracy["correct"]) == ("v1", 4, 3)
    assert 0.3 < accuracy["low"] < 0.75 < accuracy["high"] < 1
