"""Two versions of a detector are compared as the objects that callers get."""

import numpy as np
import pytest
from PIL import Image

from nereid.base.errors import OperationFailed
from nereid.models.publish.examination import ExaminationRequest, NetworkInput, Rejected
from nereid.tasks.detect.examination import SHOWN, ObjectExamination
from tests.detectors import CLASSES, KNOWN, SIDE, TestDetector, add_detector
from tests.pictures import save
from tests.tables import cases

PHOTO = NetworkInput("photo", {}, save(Image.new("RGB", (SIDE, SIDE))))
LEFT, RIGHT, LOWER = ((8.0, 8.0, 24.0, 24.0), (40.0, 8.0, 56.0, 24.0), (12.0, 8.0, 24.0, 24.0))


@pytest.fixture(scope="module")
def found_objects(tmp_path_factory) -> ObjectExamination:
    """The meaning of the outputs of a detector with the default thresholds, 0.25 and 0.45."""
    after = add_detector(tmp_path_factory.mktemp("cars")) / "cars_boxes"
    return ObjectExamination(ExaminationRequest("cars_network", after, {}, after=after, after_version=1))


def outputs(*objects) -> dict[str, np.ndarray]:
    return {name: rows[None] for name, rows in TestDetector("yolov8", objects).outputs().items()}


@cases(
    equal=([(LEFT, 0.5, 0)], [(LEFT, 0.5, 0)], [(0, "'cat' 0.50 at 8, 8, 24, 24", None)]),
    falls_below_the_threshold=(
        [(LEFT, 0.26, 0)],
        [(LEFT, 0.24, 0)],
        [(0.02, "'cat' 0.26 at 8, 8, 24, 24", "'cat' 0.24 at 8, 8, 24, 24")],
    ),
    never_an_object=([(LEFT, 0.24, 0)], [(LEFT, 0.2, 0)], []),
    gone=([(LEFT, 0.75, 0)], [], [(0.75, "'cat' 0.75 at 8, 8, 24, 24", "none")]),
    new=([], [(RIGHT, 0.5, 1)], [(0.5, "none", "'dog' 0.50 at 40, 8, 56, 24")]),
    smaller_box=(
        [(LEFT, 0.5, 0)],
        [(LOWER, 0.5, 0)],
        [(0.25, "'cat' 0.50 at 8, 8, 24, 24", "'cat' 0.50 at 12, 8, 24, 24")],
    ),
)
def test_each_object_has_its_difference(before, after, changes, found_objects):
    lines = list(found_objects.changes([PHOTO], [outputs(*before)], [outputs(*after)]))

    # Scores are float32.
    assert [line.difference for line in lines] == pytest.approx([row[0] for row in changes], abs=1e-6)
    texts = [f"object in photo: expected {was}, got {now or was}" for _, was, now in changes]
    assert [line.text for line in lines] == texts


def test_photo_without_an_object_is_noted(found_objects):
    (note,) = found_objects.notes(None, [PHOTO], [outputs((LEFT, 0.2, 0))])

    assert note == "no object is found in photo; fix: --images with photos of your objects"
    assert list(found_objects.notes(None, [PHOTO], [outputs(*KNOWN)])) == []


@cases(
    mask_coefficients_as_scores=([(LEFT, 150.0, 0)], "expected scores from 0 to 1, got 150"),
    angles_as_scores=(
        [(LEFT, 0.9, 0), (RIGHT, -0.5, 1)],
        "from 0 to 1, got -0.5: .* fix: --head with one of",
    ),
    fractions_as_pixels=([((0.1, 0.2, 0.5, 0.6), 0.9, 0)], "expected boxes in pixels, got 1 smaller"),
    pixels_as_fractions=([((640.0, 640.0, 3200.0, 2560.0), 0.9, 0)], "expected boxes within 64 x 64 pixels"),
)
def test_outputs_of_another_head_are_refused(objects, message, found_objects):
    with pytest.raises(Rejected, match=message):
        found_objects.first_run(None, [PHOTO], [outputs(*objects)], True)


@cases(
    beyond_the_labels=(
        "nms",
        3,
        "a label for each class number, got number 3 and labels for 0 to 2; fix: --labels",
    ),
    below_the_first=("tensorflow", -1, "class numbers from 1, as head tensorflow has, got 0; fix: export"),
)
def test_classes_without_a_label_are_refused(head, index, message, tmp_path):
    """An export whose classes start at another number, or a label file without the background."""
    network = TestDetector(head, ((LEFT, 0.9, index), (RIGHT, 0.5, 1)))

    with pytest.raises(OperationFailed, match=message):
        add_detector(tmp_path, network=network)


def test_first_run_shows_the_best_objects(found_objects):
    many = [((x, y, x + 4, y + 4), 1 - (x + 8 * y) / 1000, 2) for y in (0.0, 8.0) for x in range(0, 64, 8)]

    first_run = found_objects.first_run(None, [PHOTO, PHOTO], [outputs(*KNOWN), outputs(*many)], True)

    assert first_run.can_batch
    known = [(CLASSES[index], score, [*box]) for box, score, index in KNOWN]
    assert [tuple(result.values()) for result in first_run.results[0]] == known
    assert len(first_run.results[1]) == SHOWN < len(many)
    assert first_run.results[1][0]["box"] == [0, 0, 4, 4]
