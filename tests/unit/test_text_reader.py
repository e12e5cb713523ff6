"""The reader of text with the default networks."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from PIL import Image

from nereid.base import errors
from nereid.tasks.read.characters import Characters, RecognisedLine
from nereid.tasks.read.reader import Networks
from nereid.vision.imaging.decode import ImageLimits
from nereid.vision.imaging.image_times import ProbeImage
from tests.pictures import exif, save
from tests.readers import LINES, RECOGNISER, networks, page, reader
from tests.tables import cases


def texts(outcome: list[RecognisedLine] | errors.ServingError) -> list[str]:
    assert isinstance(outcome, list), outcome
    return [line.text.replace(" ", "") for line in outcome]


@cache
def plain() -> list[RecognisedLine]:
    (lines,) = reader().read([save(page())])
    return lines


EXPECTED = [line.replace(" ", "") for line in LINES]


def test_lines_are_read_in_order():
    lines = plain()

    assert texts(lines) == EXPECTED
    assert all(0.9 < line.confidence <= 1 for line in lines)
    tops = [line.box[0, 1] for line in lines]
    assert tops == sorted(tops)
    for line, top in zip(lines, (20, 84, 148), strict=True):
        assert line.box.shape == (4, 2)
        assert abs(line.box[0] - (30, top)).max() < 15


@pytest.mark.parametrize("quarters", range(4))
def test_rotated_pages_are_read_like_upright_ones(quarters):
    (lines,) = reader().read([save(page().rotate(90 * quarters, expand=True))])

    assert texts(lines) == EXPECTED
    along = lines[0].box[1] - lines[0].box[0]
    direction = [(1, 0), (0, -1), (-1, 0), (0, 1)][quarters]
    assert along @ direction > 0.95 * np.linalg.norm(along)


def test_blank_does_not_replace_a_text():
    """A line that the network turns wrongly may seem to be a certain space; its text counts all the same."""
    default = networks()
    characters = Characters.from_file(RECOGNISER)

    def first_is_turned(lines: np.ndarray) -> np.ndarray:
        return np.array([[0, 1], *[[1, 0]] * (len(lines) - 1)], np.float32)

    def recognise(lines: np.ndarray) -> list[np.ndarray]:
        """Be certain of a space in the line that is upside down."""
        index, probability, *_ = default.recognise(lines)
        words = [text.replace(" ", "") for text, *_ in characters.decode(index, probability)]
        is_turned = np.array([text not in EXPECTED for text in words])
        index[is_turned], probability[is_turned] = len(characters) - 1, 1
        return [index, probability]

    (page_lines,) = reader(other=Networks(default.detect, first_is_turned, recognise)).read([save(page())])

    assert texts(page_lines) == EXPECTED


def test_few_lines_that_seem_upside_down_are_read_in_both_directions():
    """A page is turned for its only line, whose direction the network does not see a second time."""
    seen = iter([[[0, 1]]])
    default = networks()

    def direction(lines: np.ndarray) -> np.ndarray:
        return np.array(next(seen, [[1, 0]] * len(lines)), np.float32)

    turning = reader(other=Networks(default.detect, direction, default.recognise))
    (page_lines,) = turning.read([save(page(LINES[:1]))])

    assert texts(page_lines) == EXPECTED[:1]


def test_single_line_upside_down_is_read():
    mixed = page()
    mixed.paste(mixed.crop((0, 66, 640, 130)).rotate(180), (0, 66))

    (lines,) = reader().read([save(mixed)])

    assert sorted(texts(lines)) == sorted(EXPECTED)
    (turned,) = [line for line in lines if line.text.replace(" ", "") == EXPECTED[1]]
    assert turned.box[0, 0] > turned.box[1, 0]


def test_line_whose_direction_is_not_seen_is_read_upside_down_as_well():
    """The text of its wrong direction is doubtful; a line that is read well is not read twice."""
    default, rows = networks(), []

    def recognise(lines: np.ndarray) -> Any:
        rows.append(len(lines))
        return default.recognise(lines)

    def direction(lines: np.ndarray) -> np.ndarray:
        return np.array([[1, 0]] * len(lines), np.float32)

    blind = reader(other=Networks(default.detect, direction, recognise))
    for turn, count in ((0, 1), (180, 2)):
        (page_lines,) = blind.read([save(page(LINES[:1]).rotate(turn))])

        assert texts(page_lines) == EXPECTED[:1]
        assert sum(rows) == count
        rows.clear()
    assert page_lines[0].box[0, 0] > page_lines[0].box[1, 0]


@cases(("orientation", "turn"), mirrored=(4, "FLIP_TOP_BOTTOM"), turned=(6, "ROTATE_90"))
def test_boxes_are_those_of_the_upright_image(orientation, turn):
    """The tag for the orientation is applied first: pixels that are stored differently give equal boxes."""
    (tagged,) = reader().read([save(page().transpose(Image.Transpose[turn]), exif=exif(orientation))])

    assert texts(tagged) == EXPECTED
    for one, other in zip(plain(), tagged, strict=True):
        np.testing.assert_allclose(one.box, other.box)


@cases(
    "image",
    empty=Image.new("RGB", (300, 200), "white"),
    pixel=Image.new("RGB", (1, 1)),
    tall_strip=Image.new("RGB", (3, 900), "white"),
    wide_strip=Image.new("L", (2000, 1), 255),
)
def test_images_without_text_have_no_lines(image):
    assert reader().read([save(image)]) == [[]]


def test_large_image_is_read_from_fewer_pixels():
    (lines,) = reader().read([save(page(size_px=200, width=4400), "JPEG")])

    assert texts(lines) == EXPECTED
    assert lines[2].box.max() > 1100


def test_bad_images_fail_alone():
    refused = errors.InvalidRequest("expected one image per request, got 2")

    images = [save(page()), b"no image", refused, save(Image.new("1", (2000, 2000)))]
    good, damaged, error, too_large = reader(ImageLimits(max_image_pixels=150 * 640 * 3)).read(images)

    assert texts(good) == EXPECTED
    assert isinstance(damaged, errors.InvalidImage)
    assert error is refused
    assert isinstance(too_large, errors.InvalidImage)


def noting(note: Callable[[str, np.ndarray], None]) -> Networks:
    """Return the default networks, whose name and input are noted before they run."""

    def noted(name: str, network: Callable) -> Callable:
        def run(tensor: np.ndarray) -> Any:
            note(name, tensor)
            return network(tensor)

        return run

    names = ("detect", "direction", "recognise")
    return Networks(*(noted(name, getattr(networks(), name)) for name in names))


@cases(
    lines=({"max_lines": 2}, "expected at most 2 lines of text in an image, got 3 or more"),
    time=({"max_read_s": 1e-6}, "within 1e-06 s, got 0 of 3 lines in this time"),
)
@pytest.mark.parametrize("quarters", [0, 1])
def test_image_beyond_the_budget_is_refused_before_its_lines_are_read(budget, message, quarters):
    ran, image = [], save(page().rotate(90 * quarters, expand=True))
    limited = reader(other=noting(lambda name, x: ran.append(name)), **budget)

    refused, empty = limited.read([image, save(Image.new("RGB", (64, 64)))])

    assert isinstance(refused, errors.InvalidImage)
    assert message in str(refused)
    assert empty == []
    assert "recognise" not in ran


def test_images_share_batches_of_lines():
    runs, image = [], save(page(("RB123456785GB",)))
    many = reader(other=noting(lambda name, x: runs.append(len(x)) if name == "recognise" else None))

    alone = many.read([image])
    together = many.read([image] * 4)

    assert runs == [1, 4]
    for lines in together:
        assert [line.text for line in lines] == [line.text for line in alone[0]]
        # Kernels may differ with the size of a batch.
        assert lines[0].confidence == pytest.approx(alone[0][0].confidence, abs=1e-5)


def expired() -> None:
    raise errors.DeadlineExceeded("expired while queued for an instance")


def test_failing_recogniser_fails_the_images_that_wait_for_it():
    """The others keep their own errors, which say whose fault it is."""

    def fail(tensor: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        raise errors.InferenceFailed("out of memory")

    failing = reader(other=Networks(networks().detect, networks().direction, fail))
    label, blank = save(page(("RB123456785GB",))), save(Image.new("RGB", (300, 200), "white"))
    looks = iter((False, True))
    checks = [lambda: expired() if next(looks) else None, lambda: None, lambda: None, expired, lambda: None]

    outcomes = failing.read([label, label, blank, label, label[:50]], checks)

    later, waiting, empty, late, damaged = outcomes
    assert isinstance(later, errors.DeadlineExceeded)
    assert isinstance(waiting, errors.InferenceFailed)
    assert empty == []
    assert isinstance(late, errors.DeadlineExceeded)
    assert isinstance(damaged, errors.InvalidImage)


def test_stages_and_signals_are_reported():
    signals = []
    measured = reader(sink=signals.append, reads_barcodes=True)

    measured.read([save(page())])

    times = measured.files[0].times
    stages = ["decode", "barcodes", "detect", "boxes", "crops", "direction", "recognise"]
    assert list(times.milliseconds()) == stages
    assert [span["name"] for span in times.spans()][:2] == ["decode", "barcodes"]
    assert times.spans()[0]["about"]["width"] == 640
    assert signals[0]["megapixels"] == pytest.approx(640 * 232 / 1e6)


def test_each_image_has_its_own_networks():
    called, image = [], save(page(["HELLO WORLD 2026"]))
    named = [noting(lambda step, x, name=name: called.append((name, step, len(x)))) for name in "abc"]

    outcomes = reader().read([image, b"no image", image], None, named)

    assert [texts(outcomes[index]) for index in (0, 2)] == [["HELLOWORLD2026"]] * 2
    firsts = [(name, step, 1) for name in "ac" for step in ("detect", "direction")]
    assert called == [*firsts, ("a", "recognise", 2)]


def test_health_check_runs_every_network_on_a_small_picture():
    shapes, signals = [], []
    probed = reader(other=noting(lambda _, tensor: shapes.append(tensor.shape)), sink=signals.append)

    (lines,) = probed.read([ProbeImage(save(page()))])

    assert isinstance(lines, list)
    assert shapes == [(1, 3, 64, 64), (1, 3, 48, 192), (1, 3, 48, 64)]
    assert signals == []
