"""The networks that read text, from the wheel of `rapidocr` into `text_repository`.

`python -m tools.export.text text_repository` writes all three. The network for direction stays as published.
That for detection gets the exact shape of its output: the published file says that the channels vary.
`python -m tools.export.text IN.onnx OUT.onnx` adapts a recogniser: its probabilities of 18,710 characters per
step stay inside, and only the two best characters and their probabilities leave the network.
"""

import hashlib
import shutil
import sys
from importlib.resources import files
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from nereid.tasks.read import recogniser

DETECTOR, RECOGNISER = "PP-OCRv6_det_small.onnx", "PP-OCRv6_rec_small.onnx"
NONE = onnx.TensorProto()
DIRECTION = "ch_ppocr_mobile_v2.0_cls_mobile.onnx"
MODELS = ("text_detect", "text_direction", "text_recognise")


def name_shape(source: Path, target: Path) -> None:
    """Write a detector whose output is declared as [N, 1, H, W], as it is."""
    model = onnx.load(str(source))
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 1
    onnx.checker.check_model(model)
    onnx.save(model, str(target))


def fold_bias(model: onnx.ModelProto) -> None:
    """Make the bias of the last layer a row of its weights, and append a 1 to its input.

    Adding the bias to all characters of each step takes 3 % of the time of the network.
    """
    graph, classes = model.graph, model.graph.output[0].type.tensor_type.shape.dim[2].dim_value
    weights = {tensor.name: tensor for tensor in graph.initializer}
    (add,) = [
        node
        for node in graph.node
        if node.op_type == "Add" and weights.get(node.input[1], NONE).dims == [classes]
    ]
    (multiply,) = [node for node in graph.node if add.input[0] in node.output]
    old = [weights[multiply.input[1]], weights[add.input[1]]]
    rows, bias = map(numpy_helper.to_array, old)
    for tensor in old:
        graph.initializer.remove(tensor)
    padded = f"{multiply.input[0]}_1"
    added = {
        old[0].name: np.concatenate([rows, bias[None]]),
        f"{padded}_pads": np.array([0, 0, 0, 0, 0, 1], np.int64),
        f"{padded}_value": np.float32(1),
    }
    graph.initializer.extend(numpy_helper.from_array(np.asarray(data), name) for name, data in added.items())
    index = list(graph.node).index(multiply)
    graph.node.insert(index, helper.make_node("Pad", [multiply.input[0], *list(added)[1:]], [padded]))
    multiply.input[0], multiply.output[0] = padded, add.output[0]
    graph.node.remove(add)


def adapt(source: Path, target: Path) -> None:
    """Replace the output [N, T, characters] of a recogniser by the two best characters of each step."""
    model = onnx.load(str(source))
    fold_bias(model)
    recogniser.adapt(model)
    onnx.checker.check_model(model)
    onnx.save(model, str(target))


def main(arguments: list[str]) -> None:
    """Write one adapted recogniser, or all networks of a repository."""
    if len(arguments) == 2:
        targets = [Path(arguments[1])]
        adapt(Path(arguments[0]), targets[0])
    else:
        root, models = Path(arguments[0]), Path(str(files("rapidocr"))) / "models"
        targets = [root / name / "1" / "model.onnx" for name in MODELS]
        for target in targets:
            target.parent.mkdir(parents=True, exist_ok=True)
        detect, direction, recognise = targets
        name_shape(models / DETECTOR, detect)
        shutil.copyfile(models / DIRECTION, direction)
        adapt(models / RECOGNISER, recognise)
    for target in targets:
        sha256 = hashlib.sha256(target.read_bytes()).hexdigest()
        (target.parent / "SHA256SUMS").write_text(f"{sha256}  {target.name}\n")
        print(f"{sha256}  {target}")


if __name__ == "__main__":
    main(sys.argv[1:])
