"""Boxes from the outputs of detectors: every head, the way back to the image, and suppression."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereid.base.config.model_config import ServedTensor
from nereid.base.contract import MAX_OBJECTS
from nereid.base.errors import InferenceFailed
from nereid.tasks.detect import detector as detectors
from nereid.tasks.detect.detector import ObjectFinder, Objects, match_objects, suppress
from nereid.tasks.detect.head import UnknownHead, find_head
from nereid.tasks.detect.layouts import InputSize
from nereid.vision.imaging.decode import ImageLimits
from nereid.vision.imaging.transform import Transform
from tests.detectors import CLASSES, FRAME, HEADS, KNOWN, SIDE, TestDetector
from tests.tables import cases

SAME = Transform(SIDE, SIDE, resize="exact")


def detector_of(head: str, transform: Transform = SAME, **more) -> ObjectFinder:
    arrays = TestDetector(head).outputs()
    types = {name: "TYPE_INT64" if rows.dtype == np.int64 else "TYPE_FP32" for name, rows in arrays.items()}
    outputs = [ServedTensor(name, types[name], rows.shape) for name, rows in arrays.items()]
    return ObjectFinder(find_head(outputs, FRAME, head), transform, ImageLimits(), CLASSES, **more)


def rows_of(detector: ObjectFinder, arrays) -> list[np.ndarray]:
    return [arrays[output.name] for output in detector.head.outputs]


def plain_iou(one, other) -> float:
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    common = max(width, 0) * max(height, 0)
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (one, other)]
    union = areas[0] + areas[1] - common
    return common / union if union > 0 else 0.0


@cases(
    at_the_threshold=(0.5, 0.5, [0.25]),
    just_below_it=(0.5, 0.49, []),
    unlikely_object_of_a_likely_class=(0.2, 1.0, []),
)
@pytest.mark.parametrize("head", ["yolov5", "yolox"])
def test_score_is_that_of_object_and_class(objectness, score, expected, head):
    (rows,) = TestDetector(head, ((KNOWN[0][0], score, 1),)).outputs().values()
    rows[rows[:, 4] > 0, 4] = objectness

    hits = detector_of(head).find((SIDE, SIDE), [rows])

    assert (hits.scores.tolist(), hits.classes.tolist()) == (expected, [1] * len(expected))
    assert (hits.boxes.dtype, hits.scores.dtype, hits.boxes.shape[1:]) == (np.float32, np.float32, (4,))


def test_largest_boxes_of_yolox_are_finite():
    (rows,) = TestDetector("yolox", ((KNOWN[0][0], 1.0, 1),)).outputs().values()
    rows[rows[:, 4] > 0, 2:4] = 1000

    assert detector_of("yolox").find((SIDE, SIDE), [rows]).boxes.tolist() == [[0, 0, SIDE, SIDE]]


def test_boxes_end_at_the_image_and_come_best_first():
    """A box outside, or without an area, is left out; so is a score below the threshold."""
    beyond, outside, line = (48.0, 40.0, 80.0, 72.0), (70.0, 8.0, 90.0, 20.0), (8.0, 8.0, 8.0, 20.0)
    objects = [(beyond, 0.5, 1), ((-8.0, -4.0, 24.0, 16.0), 0.75, 0), (outside, 0.9, 2), (line, 0.9, 2)]
    detector = detector_of("yolov8", score_threshold=0.5)
    arrays = TestDetector("yolov8", (*objects, ((0.0, 0.0, 9.0, 9.0), 0.49, 2))).outputs()

    hits = detector.find((2 * SIDE, SIDE), rows_of(detector, arrays))

    assert hits.boxes.tolist() == [[0, 0, 48, 16], [96, 40, 128, 64]]
    assert (hits.scores.tolist(), hits.classes.tolist()) == ([0.75, 0.5], [0, 1])


@pytest.mark.parametrize("head", HEADS)
def test_known_objects_of_every_head(head):
    detector = detector_of(head)
    hits = detector.find((SIDE, SIDE), rows_of(detector, TestDetector(head).outputs()))

    assert hits.boxes.tolist() == [list(box) for box, _, _ in KNOWN]
    assert hits.scores.tolist() == [score for _, score, _ in KNOWN]
    assert [detector.label(index) for index in hits.classes] == [CLASSES[index] for _, _, index in KNOWN]


@cases(
    rows_of_seven=(
        {"output": (3, 7)},
        [np.float32([[1, 2, 11, 22, 1, 0.5, 2], [0, 0, 8, 8, 0.5, 0.25, 1], [0, 0, 8, 8, 1, 1, -1]])],
    ),
    boxes_and_classes=(
        {"dets": (2, 5), "labels": (2,)},
        [np.array([[1, 2, 11, 22, 0.5], [0, 0, 8, 8, 0.1]], np.float32), np.array([2, 1])],
    ),
    number_without_a_dim=(
        {"num": (), "boxes": (2, 4), "scores": (2,), "labels": (2,)},
        [
            np.array(1),
            np.float32([[1, 2, 11, 22], [0, 0, 8, 8]]),
            np.float32([0.5, np.nan]),
            np.array([2, 1]),
        ],
    ),
)
def test_forms_of_suppressed_outputs(form, arrays):
    types = {"labels": "TYPE_INT64", "num": "TYPE_INT64"}
    outputs = [ServedTensor(name, types.get(name, "TYPE_FP32"), dims) for name, dims in form.items()]

    head = find_head(outputs, FRAME)
    hits = ObjectFinder(head, SAME, ImageLimits()).find((SIDE, SIDE), arrays)

    assert head.name == "nms"
    assert hits.boxes.tolist() == [[1, 2, 11, 22]]
    assert (hits.scores.tolist(), hits.classes.tolist()) == ([0.5], [2])


def matrix(*dims: int, name: str = "output0") -> ServedTensor:
    return ServedTensor(name, "TYPE_FP32", dims)


def numbers(*dims: int, name: str = "labels", datatype: str = "TYPE_INT64") -> ServedTensor:
    return ServedTensor(name, datatype, dims)


GRID = [matrix(8400, 4, name="boxes"), matrix(8400, 80, name="confs")]
MASKED = [matrix(100, 5, name="dets"), numbers(100), matrix(100, 28, 28, name="masks")]
MASK_RCNN = [matrix(-1, 4, name="boxes"), numbers(-1), matrix(-1, name="scores")]
KEYPOINT_RCNN = [*MASK_RCNN, matrix(-1, 17, 3, name="keypoints"), matrix(-1, 17, name="keypoints_scores")]
MASK_RCNN += [matrix(-1, 1, 640, 640, name="masks")]
YOLOV4 = [matrix(10647, 1, 4, name="boxes"), matrix(10647, 80, name="confs")]
DETR = [matrix(100, 92, name="logits"), matrix(100, 4, name="pred_boxes")]
RF_DETR = [matrix(300, 4, name="dets"), matrix(300, 3, name="labels")]
ULTRA_FACE = [matrix(4420, 2, name="scores"), matrix(4420, 4, name="boxes")]
TENSORFLOW = {"detection_boxes": (100, 4), "detection_scores": (100,), "detection_classes": (100,)}
TENSORFLOW |= {"num_detections": ()}
TENSORFLOW_IN_SCOPE = [matrix(*dims, name=f"model/{name}:0") for name, dims in TENSORFLOW.items()]


@cases(
    yolov5=([matrix(25200, 85)], 0, "yolov5"),
    yolov5_with_its_grids=([matrix(25200, 85), matrix(3, 80, 80, 85, name="340")], 0, "yolov5"),
    yolov8=([matrix(84, 8400)], 0, "yolov8"),
    end_to_end=([matrix(300, 6)], 80, "nms"),
    detr=(DETR, 91, "detr"),
    rt_detr_of_Ultralytics=([matrix(300, 84)], 80, "rtdetr"),
    yolo_nas=([matrix(8400, 4, name="904"), matrix(8400, 80, name="913")], 80, "yolonas"),
    rt_detr=([matrix(300, 80, name="logits"), matrix(300, 4, name="boxes")], 80, "detr_sigmoid"),
    yolov3_tiny=([matrix(84, 2000)], 0, "yolov8"),
    yolov8_p2=([matrix(84, 34000)], 0, "yolov8"),
    masks_of_mmdet=(MASKED, 0, "nms"),
    masks_of_torchvision=(MASK_RCNN, 0, "torchvision"),
    key_points_of_torchvision=(KEYPOINT_RCNN, 0, "torchvision"),
    tensorflow_in_a_scope=(TENSORFLOW_IN_SCOPE, 0, "tensorflow"),
)
def test_certain_heads_are_found(outputs, labels, name):
    assert find_head(outputs, InputSize(640, 640), labels=labels).name == name


@cases(
    yolox_or_decoded=([matrix(8400, 85)], "", 0, r"uncertain layout of .*yolox: "),
    detr_without_labels=(DETR, "", 0, "fix: --head with one of detr: "),
    scores=([matrix(1000)], "", 0, r"expected the outputs of a detector, got .* known: yolov5: \[N,anch"),
    boxes_beside_their_scores=(YOLOV4, "", 0, "expected the outputs of a detector, got 'boxes' FP32 "),
    objectness_beside_classes=([*GRID, matrix(8400)], "", 0, "expected the outputs of a detector"),
    list_for_all_images=([matrix(7)], "nms", 0, r"got one list for all images, 'output0' FP32 \[N, 7\]; fix"),
    unknown=([matrix(25200, 85)], "ssd", 0, "invalid head: expected one of yolov5, .*, got 'ssd'"),
    other_form=([matrix(25200, 85)], "detr", 0, r"head detr: expected logits .*, got 'output0' FP32"),
    yolox_of_another_size=([matrix(3549, 85)], "yolox", 0, "expected 8,400 anchors, .*, got 3,549"),
    columns_or_one_number_for_2_labels=([matrix(300, 6)], "", 2, r"rtdetr: .*; nms: "),
    anchors_or_queries_for_1_label=(ULTRA_FACE, "", 1, "uncertain layout"),
    sigmoid_or_softmax_for_2_labels=(RF_DETR, "", 2, "uncertain layout"),
)
def test_uncertain_or_wrong_heads_are_refused(outputs, name, labels, message):
    with pytest.raises(UnknownHead, match=message):
        find_head(outputs, InputSize(640, 640), name, labels)


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
@pytest.mark.parametrize("head", HEADS)
def test_numbers_that_are_not_finite_are_errors(head, bad):
    detector, arrays = detector_of(head), dict(TestDetector(head).outputs())
    name = next(key for key, rows in arrays.items() if rows.dtype == np.float32)
    arrays[name] = arrays[name].copy()
    arrays[name][0, 0] = bad

    with pytest.raises(InferenceFailed, match=f"output '{name}': expected finite .*, got NaN .* in 1 of "):
        detector.find((SIDE, SIDE), rows_of(detector, arrays))


def test_output_of_another_shape_is_an_error():
    with pytest.raises(InferenceFailed, match=r"expected shape \[7, 84\] per image, got \[7, 80\]"):
        detector_of("yolov8").find((SIDE, SIDE), [np.zeros((7, 80), np.float32)])


TRANSFORMS = {
    "exact": Transform(48, 80, resize="exact"),
    "letterbox": Transform(64, 64, resize="letterbox"),
    "letterbox at the start": Transform(64, 96, resize="letterbox", pad_position="after"),
    "crop": Transform(48, 32, resize_shorter_px=60),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@settings(max_examples=60)
@given(size_wh=st.tuples(st.integers(1, 400), st.integers(1, 400)), point=st.tuples(*[st.floats(0, 1)] * 2))
def test_the_way_back_undoes_the_resize(transform, size_wh, point):
    rows, columns = transform.place(size_wh)
    there = [
        placed.at - placed.span.offset + part * size / placed.span.scale
        for placed, part, size in zip((columns, rows), point, size_wh, strict=True)
    ]
    detector = replace(detector_of("yolov8"), transform=transform)

    back = detector._in_image(np.array([[*there, *there]]), size_wh)

    np.testing.assert_allclose(back, [[point[axis % 2] * size_wh[axis % 2] for axis in range(4)]], atol=1e-9)


def test_boxes_in_the_margin_are_left_out():
    objects = (((0.0, 0.0, 64.0, 16.0), 0.9, 0), ((8.0, 8.0, 24.0, 24.0), 0.5, 1))
    arrays = TestDetector("yolov8", objects).outputs()
    detector = detector_of("yolov8", transform=TRANSFORMS["letterbox"])

    assert detector.find((128, 64), rows_of(detector, arrays)).boxes.tolist() == [[16, 0, 48, 16]]


def test_numbers_of_candidates_and_objects_are_bounded(monkeypatch):
    rows = np.zeros((400, 6), np.float32)
    places = np.arange(400)
    rows[:, 0], rows[:, 1] = places % 60, places // 60
    rows[:, 2:4] = rows[:, :2] + 1
    rows[:, 4] = np.linspace(0.5, 1, 400)
    head = find_head([matrix(400, 6)], FRAME)

    hits = ObjectFinder(head, SAME, ImageLimits()).find((SIDE, SIDE), [rows])

    assert hits.scores.tolist() == rows[::-1, 4][:MAX_OBJECTS].tolist()
    monkeypatch.setattr(detectors, "MAX_CANDIDATES", 7)
    few = ObjectFinder(head, SAME, ImageLimits()).find((SIDE, SIDE), [rows])
    assert few.scores.tolist() == rows[::-1, 4][:7].tolist()


boxes = st.tuples(*[st.tuples(*[st.integers(0, 12)] * 2).map(sorted)] * 2, st.integers(0, 2))


@settings(max_examples=150)
@given(st.lists(boxes, max_size=25), st.sampled_from([0.0, 0.25, 0.45, 0.5, 1.0]), st.integers(1, 10))
def test_suppression_equals_the_plain_reference(drawn, iou, limit):
    boxes = np.array([[x[0], y[0], x[1], y[1]] for x, y, _ in drawn], np.float64).reshape(-1, 4)
    classes = np.array([index for _, _, index in drawn], np.int64)
    kept: list[int] = []
    for position, box in enumerate(boxes):
        others = [other for other in kept if classes[other] == classes[position]]
        if all(plain_iou(boxes[other], box) <= iou for other in others):
            kept.append(position)

    assert suppress(boxes, classes, iou, limit).tolist() == kept[:limit]


def objects(*found) -> Objects:
    boxes, scores, classes = zip(*found, strict=True) if found else ((), (), ())
    boxes = np.array(boxes, np.float32).reshape(-1, 4)
    return Objects(boxes, np.array(scores, np.float32), np.array(classes, np.int64))


BOX, NEAR, FAR = (0, 0, 10, 10), (0, 0, 10, 8), (50, 50, 60, 60)


@cases(
    equal=([(BOX, 0.5, 1)], [(BOX, 0.5, 1)], [((0, 0), 0.0)]),
    moved=([(BOX, 0.5, 1)], [(NEAR, 0.5, 1)], [((0, 0), 0.2)]),
    other_class=([(BOX, 0.5, 1)], [(BOX, 0.25, 2)], [((0, None), 0.5), ((None, 0), 0.25)]),
    missing=([(BOX, 0.5, 1), (FAR, 0.25, 1)], [(FAR, 0.25, 1)], [((0, None), 0.5), ((1, 0), 0.0)]),
    two_of_one_place=(
        [(BOX, 0.5, 1), (NEAR, 0.5, 1)],
        [(NEAR, 0.5, 1), (BOX, 0.5, 1)],
        [((0, 1), 0.0), ((1, 0), 0.0)],
    ),
    best_overlap_before_best_score=(
        [(NEAR, 0.75, 1), (BOX, 0.5, 1)],
        [(BOX, 0.5, 1)],
        [((0, None), 0.75), ((1, 0), 0.0)],
    ),
    none=([], [], []),
)
def test_objects_of_two_detectors_are_matched(one, other, pairs):
    matches = match_objects(objects(*one), objects(*other))

    assert [pair.indices for pair in matches] == [indices for indices, _ in pairs]
    assert [pair.difference for pair in matches] == pytest.approx([difference for _, difference in pairs])
