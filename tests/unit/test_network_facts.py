"""Class names and preprocessing that exporters wrote: into the ONNX file, and next to it."""

import json

import onnx
import pytest
from onnx import helper

from nereid.base.errors import WrongUsage
from nereid.models.publish.importing.network_facts import MAX_NEIGHBOUR_BYTES, read
from nereid.repository import onnx_file
from tests.tables import cases
from tests.user_networks import UserNetwork

NAMES = ["tench", "goldfish"]
TEXT = {"labels.txt": "tench\ngoldfish\n"}
HUGGING_FACE = {"config.json": json.dumps({"id2label": {"1": "goldfish", "0": "tench"}})}
TIMM = {
    "label_names": NAMES,
    "pretrained_cfg": {
        "input_size": [3, 224, 224],
        "crop_pct": 0.9,
        "interpolation": "bicubic",
        "mean": [0.5, 0.4, 0.3],
        "std": [0.2, 0.2, 0.2],
    },
}


@pytest.fixture
def found(tmp_path):
    def read_metadata(properties=None, files=None):
        model = UserNetwork().build()
        helper.set_model_props(model, properties or {})
        for name, text in (files or {}).items():
            (tmp_path / name).write_text(text)
        onnx.save(model, tmp_path / "model.onnx")
        return read(tmp_path, onnx_file.read(tmp_path / "model.onnx"))

    return read_metadata


@cases(
    ultralytics=({"names": "{0: 'tench', 1: 'goldfish'}"}, {}, "the file's metadata 'names'"),
    line_breaks=({"names": "['tench ', ' goldfish\\n']"}, {}, "the file's metadata 'names'"),
    json=({"classes": json.dumps(NAMES)}, {}, "the file's metadata 'classes'"),
    timm=({}, {"config.json": json.dumps(TIMM)}, "'label_names' of 'config.json' next to the file"),
    hugging_face=({}, HUGGING_FACE, "'id2label' of 'config.json' next to the file"),
    layout_detectors_of_PaddleOCR=({"character": "tench\ngoldfish"}, {}, "the file's metadata 'character'"),
    text_first=({"names": "['a', 'b']"}, TEXT, "'labels.txt' next to the file"),
)
def test_labels_are_found(properties, files, origin, found):
    metadata = found(properties, files)

    assert (metadata.labels, metadata.labels_from) == (tuple(NAMES), origin)
    assert metadata.characters == ()


def test_characters_of_a_recogniser_are_no_labels(found):
    metadata = found({"character": "a\nb\n½\n//"})

    assert (metadata.labels, metadata.characters) == ((), ("a", "b", "½", "//"))


@cases(
    nothing=({}, {}),
    text=({"names": "tench, goldfish"}, {}),
    numbers=({"names": "[1, 2]"}, {}),
    a_gap=({"names": "{0: 'tench', 2: 'goldfish'}"}, {}),
    code=({"names": "__import__('os').getpid()"}, {}),
    deep=({"names": "[" * 100_000}, {}),
    long=({"names": json.dumps(["x" * 2**20])}, {}),
    broken_file=({}, {"config.json": "{"}),
    deep_file=({}, {"config.json": "[" * 100_000}),
    a_document_for_a_word=({"task": "[" * 1000}, {}),
    another_document=({}, {"config.json": "[]"}),
    no_numbers=({}, {"config.json": json.dumps({"pretrained_cfg": {"input_size": "big"}})}),
)
def test_unknown_metadata_is_skipped(properties, files, found):
    metadata = found(properties, files)

    assert (metadata.labels, dict(metadata.exporter_settings.parameters), metadata.task) == ((), {}, "")


def test_preprocessing_of_ultralytics(found):
    """A classifier of Ultralytics sees pixels / 255 of the centre, a detector those of a letterbox."""
    noted = found({"task": "classify", "imgsz": "[224, 224]"}).exporter_settings

    assert dict(noted.parameters) == {"resize_shorter_px": "224", "scale": str(1 / 255)}
    assert found({"task": "segment", "imgsz": "[640, 640]"}).exporter_settings.parameters == {}
    detector = found({"task": "detect", "imgsz": "[480, 640]"})
    assert (detector.task, detector.exporter_settings.parameters["resize"]) == ("detect", "letterbox")
    assert detector.exporter_settings.size == (480, 640)


SHORTER = {"resize_shorter_px": "248"}


@cases(
    center=({}, SHORTER),
    squash=({"crop_mode": "squash", "crop_pct": 1}, {"resize": "exact"}),
    border=({"crop_mode": "border", "crop_pct": 1.0}, {"resize": "letterbox", "pad_color": "128, 102, 76"}),
    squash_and_crop=({"crop_mode": "squash"}, {}),
    border_and_crop=({"crop_mode": "border"}, {}),
    not_square=({"input_size": [3, 128, 256]}, {}),
    another_mode=({"crop_mode": "spiral"}, {}),
)
def test_preprocessing_of_timm(changes, parameters, found):
    """The numbers of timm are for pixels / 255, and the crop is a share of the resized image."""
    config = json.dumps({"pretrained_cfg": TIMM["pretrained_cfg"] | changes})
    noted = found({}, {"config.json": config}).exporter_settings

    numbers = {"interpolation": "bicubic", "mean": "127.5, 102, 76.5", "std": "51, 51, 51"}
    assert noted.parameters == (parameters | numbers if parameters else {})
    assert bool(noted.problem) is not bool(parameters)


EDGES = {"do_rescale": True, "do_normalize": True, "image_mean": [0.5] * 3}
EDGES |= {"image_std": [0.2] * 3, "resample": 3}
LEVELS = {"mean": "127.5, 127.5, 127.5", "std": "51, 51, 51", "interpolation": "bicubic"}
EXACT = {"resize": "exact"} | LEVELS
CROPPED = EDGES | {"size": 248, "do_center_crop": True, "crop_size": 224}
CLIP = CROPPED | {"size": {"shortest_edge": 248}}
LEVIT = CLIP | {"size": {"shortest_edge": 224}}
LEVIT_EXPECTED = {"resize_shorter_px": "256"} | LEVELS
RESCALED = {"resize": "exact", "scale": "0.00392156862745098", "interpolation": "bilinear"}


@cases(
    vit=(EDGES | {"size": {"height": 224, "width": 224}}, EXACT, (224, 224)),
    old=(EDGES | {"size": 224}, EXACT, (224, 224)),
    clip=(CLIP, SHORTER | LEVELS, (224, 224)),
    convnext=(EDGES | {"size": {"shortest_edge": 224}, "crop_pct": 0.9}, SHORTER | LEVELS, (224, 224)),
    convnext_384=(EDGES | {"size": {"shortest_edge": 384}, "crop_pct": 0.9}, EXACT, (384, 384)),
    rt_detr=(
        {"do_normalize": False, "do_rescale": True, "size": {"height": 480, "width": 640}},
        RESCALED,
        (480, 640),
    ),
    detr=(EDGES | {"size": {"shortest_edge": 800, "longest_edge": 1333}}, EXACT, (800, 800)),
    mobilevit=(
        {"do_rescale": True, "size": {"height": 256, "width": 256}, "do_flip_channel_order": True},
        RESCALED | {"color_order": "BGR"},
        (256, 256),
    ),
    efficientnet=(EDGES | {"size": 224, "rescale_offset": True}, {}, (224, 224)),
    both_sides_then_a_crop=(
        EDGES | {"size": {"height": 256, "width": 256}, "do_center_crop": True, "crop_size": 224},
        {},
        (224, 224),
    ),
    old_deit=(CROPPED | {"feature_extractor_type": "DeiTFeatureExtractor"}, {}, (224, 224)),
    old_crop_without_a_type=(CROPPED, {}, (224, 224)),
    old_clip=(CROPPED | {"feature_extractor_type": "CLIPFeatureExtractor"}, SHORTER | LEVELS, (224, 224)),
    levit=(LEVIT | {"image_processor_type": "LevitImageProcessorFast"}, LEVIT_EXPECTED, (224, 224)),
    old_levit=(
        EDGES | {"feature_extractor_type": "LevitFeatureExtractor", "size": 224, "do_center_crop": True},
        LEVIT_EXPECTED,
        (224, 224),
    ),
    poolformer_384=(
        EDGES | {"size": {"shortest_edge": 384}, "crop_pct": 0.96, "do_center_crop": True, "crop_size": 384},
        {"resize_shorter_px": "400"} | LEVELS,
        (384, 384),
    ),
    no_crop_size=(EDGES | {"size": {"shortest_edge": 224}, "do_center_crop": True}, {}, (0, 0)),
    no_do_center_crop=(EDGES | {"size": {"shortest_edge": 248}, "crop_size": 224}, {}, (224, 224)),
    crop_alone=(CLIP | {"do_resize": False}, {}, (0, 0)),
    padded_crop=(CLIP | {"size": {"shortest_edge": 200}}, {}, (224, 224)),
    rounded_then_a_crop=(CLIP | {"size_divisor": 32}, {}, (224, 224)),
    longest_edge=(EDGES | {"size": {"longest_edge": 1024}}, {}, (0, 0)),
    no_size=(EDGES | {"do_resize": True}, EXACT, (0, 0)),
    nearest=(EDGES | {"size": 224, "resample": 0}, {}, (224, 224)),
)
def test_preprocessing_of_transformers(config, parameters, size, found):
    noted = found({}, {"preprocessor_config.json": json.dumps(config)}).exporter_settings

    assert (noted.parameters, noted.size, bool(noted.problem)) == (parameters, size, not parameters)


@pytest.mark.parametrize("name", ["config.json", "labels.txt"])
def test_file_next_to_the_network_has_a_bound(found, tmp_path, name):
    with (tmp_path / name).open("wb") as file:
        file.truncate(MAX_NEIGHBOUR_BYTES + 1)

    message = f"'{name}' next to the file: expected at most 16 MiB, got 16,777,217"
    with pytest.raises(WrongUsage, match=message):
        found()
