"""Detectors as other programs export them, added without an option that their files answer."""

import numpy as np
import onnx
import pytest
from onnx import helper
from PIL import Image

from nereid.base.config.model_config import ModelConfig
from nereid.base.errors import WrongUsage
from nereid.models.publish.add import AddProposal, AddRequest
from tests import real_exports
from tests.detectors import CLASSES, KNOWN, SIDE, TestDetector
from tests.networks import constant, value, written
from tests.publishing import propose
from tests.tables import cases

pytestmark = pytest.mark.process
# Source: ultralytics, engine/exporter.py.
ULTRALYTICS = {"task": "detect", "imgsz": f"[{SIDE}, {SIDE}]", "names": str(dict(enumerate(CLASSES)))}
ULTRALYTICS |= {"stride": "32", "batch": "1"}
FOUND = [(CLASSES[index], score) for _, score, index in KNOWN]


@pytest.fixture
def proposed(tmp_path):
    Image.new("RGB", (SIDE, SIDE)).save(photo := tmp_path / "photo.png")

    def add_network(model: onnx.ModelProto, metadata=None, **more) -> AddProposal:
        helper.set_model_props(model, metadata or {})
        onnx.save(model, tmp_path / "cars.onnx")
        request = AddRequest(tmp_path / "cars.onnx", "cars", images=(photo,), **more)
        return propose(tmp_path / "models", request)

    return add_network


def any_size(model: onnx.ModelProto) -> onnx.ModelProto:
    """Declare height, width and all dims of the outputs as variable, as exports with dynamic axes do."""
    for axis, name in ((2, "height"), (3, "width")):
        model.graph.input[0].type.tensor_type.shape.dim[axis].dim_param = name
    for output in model.graph.output:
        for axis, dim in enumerate(output.type.tensor_type.shape.dim):
            dim.dim_param = f"{output.name}_{axis}"
    return model


def with_nms() -> onnx.ModelProto:
    """Return rows as Ultralytics does, whose last Slice has the batch as its end and hides all dims."""
    rows = np.zeros((1, 10, 6), np.float32)
    rows[0, : len(KNOWN)] = [(*box, score, index) for box, score, index in KNOWN]
    nodes = """batch = Shape<start = 0, end = 1>(image) counted = NonZero(image)
        shape = Concat<axis = 0>(batch, inner) all = Expand(rows, shape)
        output0 = Slice(all, first, batch, first)"""
    graph = f"(float[N,3,{SIDE},{SIDE}] image) => (float[N,M,C] output0) {{ {nodes} }}"
    return written(graph, inner=np.array([10, 6]), first=np.array([0]), rows=rows)


# The last test of this file has those of today's Ultralytics.
@cases(
    nms=(with_nms(), {"args": "{'nms': True}"}, "nms"),
    strange_notes=(TestDetector("yolov8").build(), {"args": "[1]", "imgsz": "[-1, 0]"}, "yolov8"),
    yolov10=(with_nms(), {"description": "Ultralytics YOLOv10n", "names": "['cat', 'dog']"}, "nms"),
    rt_detr=(TestDetector("rtdetr", batch=1).build(), {"description": "Ultralytics rtdetr-l"}, "rtdetr"),
)
def test_metadata_of_ultralytics_is_enough(model, more, head, proposed, tmp_path):
    plan = proposed(model, ULTRALYTICS | more)

    assert (plan.importer.name, plan.settings.head, plan.settings.sides_px) == ("detect", head, (SIDE, SIDE))
    assert [(result["label"], result["score"]) for result in plan.results["photo.png"]] == FOUND
    assert ModelConfig.from_file(tmp_path / "models" / "cars_network", 1).max_batch_size > 0


def of_one_image(model: onnx.ModelProto, rank: int) -> onnx.ModelProto:
    """Take an image of that rank, and return results without a batch, as torchvision's exports do."""
    (image,) = model.graph.input
    if rank == 3:
        model.graph.node.insert(0, helper.make_node("Unsqueeze", ["alone", "axis"], ["image"]))
        image.name = "alone"
        del image.type.tensor_type.shape.dim[0]
    model.graph.initializer.append(constant("axis", np.array([0])))
    for output in model.graph.output:
        model.graph.node.append(helper.make_node("Squeeze", [output.name, "axis"], [f"{output.name}_alone"]))
        output.name += "_alone"
        del output.type.tensor_type.shape.dim[0]
        output.type.tensor_type.shape.dim[0].dim_param = "found"
    return model


@cases(("rank", "parameters"), alone=(3, {}), batch_of_one=(4, {}), normalised=(4, {"scale": "1"}))
def test_results_of_one_image_get_a_batch(proposed, rank, parameters):
    """As torchvision documents its export; two images in one run would get the results of the first."""
    plan = proposed(of_one_image(TestDetector("torchvision", batch=1).build(), rank), parameters=parameters)

    settings = plan.settings
    assert (settings.head, settings.can_batch) == ("torchvision", False)
    assert settings.parameters["resize"] == "exact"
    assert [(result["label"], result["score"]) for result in plan.results["photo.png"]] == [
        (str(index), score) for _, score, index in KNOWN
    ]


def test_tensorflow_resizes_itself(proposed):
    """As tf2onnx writes it: bytes of any size."""
    model = any_size(TestDetector("tensorflow").build())
    model.graph.node.insert(0, helper.make_node("Cast", ["bytes"], ["image"], to=onnx.TensorProto.FLOAT))
    model.graph.input[0].name = "bytes"
    model.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.UINT8

    plan = proposed(model)

    assert (plan.settings.sides_px, plan.settings.parameters["resize"]) == ((640, 640), "exact")
    assert [tuple(result["box"]) for result in plan.results["photo.png"]] == [box for box, _, _ in KNOWN]


def test_boxes_of_transformers_are_found_by_their_name(proposed):
    """Its exports declare even the four sides of a box as variable."""
    model = any_size(TestDetector("detr_sigmoid").build())
    model.graph.output[0].type.tensor_type.shape.dim[2].dim_value = len(CLASSES)

    names = {"names": str(dict(enumerate(CLASSES)))}
    plan = proposed(model, names, size=(64, 64), parameters={"scale": "1"})

    assert [(result["label"], result["score"]) for result in plan.results["photo.png"]] == FOUND


def test_given_labels_tell_the_head(proposed, tmp_path):
    """RT-DETR of transformers has one column per class, and DETR one more."""
    (labels := tmp_path / "names.txt").write_text("\n".join(CLASSES))

    options = {"task": "detect", "parameters": {"preset": "rtdetr"}, "labels": labels}
    plan = proposed(TestDetector("detr_sigmoid").build(), **options)

    assert [(result["label"], result["score"]) for result in plan.results["photo.png"]] == FOUND


FLAT_IO = "(float[1,7,1,1] image) => (float[num_predictions,7] graph2_flat_predictions)"
FLAT = written(f"{FLAT_IO} {{ graph2_flat_predictions = Flatten(image) }}")


def with_output(*dims: int) -> onnx.ModelProto:
    """Return a network of the head yolov8 with another output."""
    model = TestDetector("yolov8").build()
    model.graph.initializer.append(constant("other", np.zeros(dims, np.float32)))
    model.graph.node.append(helper.make_node("Identity", ["other"], ["output1"]))
    model.graph.output.append(value("output1", "FP32", dims))
    return model


TWO_INPUTS = TestDetector("nms").build()
TWO_INPUTS.graph.input.append(value("orig_target_sizes", "INT64", ["N", 2]))
UNBATCHED = of_one_image(TestDetector("nms", batch=1).build(), 3)


@cases(
    masks=(with_output(1, 2, SIDE // 4, SIDE // 4), {}, r"prototypes of masks, FP32 \[1,2,16,16\], .* fix"),
    angles=(
        TestDetector("yolov8").build(),
        {"names": "['a', 'b']"},
        "each of the 3 classes .*, got 2; .* fix",
    ),
    sizes=(TWO_INPUTS, {}, "got: image, orig_target_sizes; fix: export it with the images as its only"),
    one_image=(UNBATCHED, {}, rf"input 'alone': .*, got FP32 \[3,{SIDE},{SIDE}\]"),
)
def test_files_that_only_look_like_detectors_are_refused(model, metadata, message, proposed):
    """As exports of segmentation look without Ultralytics' metadata, and those with post-processing."""
    with pytest.raises(WrongUsage, match=message):
        proposed(model, metadata, task="detect", parameters={"preset": "yolo"})


@pytest.mark.parametrize("task", ["", "detect"])
@cases(
    masks=(
        TestDetector("yolov8").build(),
        ULTRALYTICS | {"task": "segment"},
        "names the task 'segment': its masks cannot be served; fix: a network for one of classify",
    ),
    YOLO_NASs_list=(FLAT, {}, "expected rows of each image, got one list .* fix: export it with"),
)
def test_results_that_cannot_be_served_are_named(model, metadata, message, proposed, task):
    with pytest.raises(WrongUsage, match=message):
        proposed(model, metadata, task=task)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    return real_exports.unpack(tmp_path_factory.mktemp("exports"))


@pytest.mark.parametrize("axes", real_exports.AXES)
@pytest.mark.parametrize("family", real_exports.ULTRALYTICS)
def test_boxes_are_those_of_ultralytics(exported, tmp_path, family, axes):
    real_exports.assert_same_objects(exported, family, axes, tmp_path / "models")
