"""Settings of a `preprocess` model from its config.pbtxt, and presets that set several parameters."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import inf
from typing import Any

from nereid.base.config.model_config import ModelConfig
from nereid.base.errors import InvalidConfig
from nereid.vision.imaging.decode import ImageLimits
from nereid.vision.imaging.transform import DATATYPES, Transform

PRESETS: dict[str, dict[str, str]] = {
    # Source: torchvision, transforms/_presets.py, ImageClassification; times 255.
    "imagenet": {
        "resize_shorter_px": "256",
        "mean": "123.675, 116.28, 103.53",
        "std": "58.395, 57.12, 57.375",
    },
    # Source: tensorflow/tpu, models/official/efficientnet/lite, MEAN_RGB and STDDEV_RGB.
    "efficientnet_lite": {"resize_shorter_px": "256", "mean": "127, 127, 127", "std": "128, 128, 128"},
    # Source: openai/CLIP, clip/clip.py, _transform; times 255.
    "clip": {
        "resize_shorter_px": "224",
        "interpolation": "bicubic",
        "mean": "122.7709383, 116.7460125, 104.09373615",
        "std": "68.5005327, 66.6321579, 70.32316305",
    },
    # Source: ultralytics, data/augment.py, LetterBox; then pixels / 255.
    "letterbox": {"resize": "letterbox", "scale": "0.00392156862745098"},
    # The same, under the name that users look for.
    "yolo": {"resize": "letterbox", "scale": "0.00392156862745098"},
    # Source: Megvii-BaseDetection/YOLOX, data/data_augment.py, preproc: no scale, pads bottom and right.
    "yolox": {"resize": "letterbox", "pad_position": "after", "color_order": "BGR", "scale": "1"},
    # Source: facebookresearch/detr, datasets/coco.py, make_coco_transforms; sized to the exported network.
    "detr": {"resize": "exact", "mean": "123.675, 116.28, 103.53", "std": "58.395, 57.12, 57.375"},
    # Source: lyuwenyu/RT-DETR, rtdetrv2_pytorch/configs/rtdetrv2/include/dataloader.yml.
    "rtdetr": {"resize": "exact", "scale": "0.00392156862745098"},
}
NORMALISATION = {"mean", "std", "scale"}
# The preset parameters that a given parameter removes, because they would contradict it.
REPLACES = {
    "mean": {"scale"},
    "std": {"scale"},
    "scale": {"mean", "std"},
    "resize": {"resize_shorter_px", "pad_position"},
}


@dataclass(frozen=True, slots=True)
class PreprocessSettings:
    """Parameters of a `preprocess` model; its output sets the transform's other fields.

    `decode_threads` is per instance (0: its share of cores); `gpu_memory_limit_bytes` is 0 for no limit.
    `preset` sets the parameters in PRESETS that are not given; `scale` sets mean 0 and std 1 / scale.
    """

    transform: Transform
    limits: ImageLimits
    decode_threads: int = 0
    gpu_memory_limit_bytes: int = 0
    preset: str = ""
    scale: float = 0.0

    def __post_init__(self) -> None:
        for name in ("decode_threads", "gpu_memory_limit_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: expected 0 or more, got {getattr(self, name)}")

    @classmethod
    def from_config(cls, config: ModelConfig) -> "PreprocessSettings":
        """Read the parameters and the output of `config`.

        Raises:
            InvalidConfig: a parameter is unknown or invalid, or contradicts another one or the output.
        """
        try:
            output = _output(config)
            parameters = _expand(config.parameters, output["datatype"])
        except ValueError as error:
            raise InvalidConfig(f"model '{config.name}': {error}") from None
        settings = replace(config, parameters=parameters).settings(cls, **output)
        if "decode_margin" in config.parameters and not settings.transform.antialias:
            raise InvalidConfig(f"model '{config.name}': decode_margin contradicts antialias = false")
        return settings


# Names of all parameters.
PARAMETERS = {
    field.name for field in (*fields(Transform), *fields(ImageLimits), *fields(PreprocessSettings))
} - {"transform", "limits", "height_px", "width_px", "datatype"}


def _output(config: ModelConfig) -> dict[str, Any]:
    if len(config.outputs) != 1:
        raise ValueError(f"expected one output, got {len(config.outputs)}")
    output = config.outputs[0]
    datatype = output.datatype.removeprefix("TYPE_")
    if datatype not in DATATYPES:
        datatypes = ", ".join(f"TYPE_{name}" for name in DATATYPES)
        raise ValueError(f"output '{output.name}': expected one of {datatypes}, got {output.datatype}")
    is_last = config.parameters.get("layout") == "NHWC"
    expected = "[H, W, 3] for layout NHWC" if is_last else "[3, H, W] for layout NCHW"
    sizes = output.dims[:-1] if is_last else output.dims[1:]
    if len(sizes) != 2 or output.dims != ((*sizes, 3) if is_last else (3, *sizes)) or min(sizes) < 1:
        raise ValueError(f"output '{output.name}': expected dims {expected}, got {list(output.dims)}")
    return {"datatype": datatype, "height_px": sizes[0], "width_px": sizes[1]}


def _expand(parameters: Mapping[str, str], datatype: str) -> dict[str, str]:
    normalised = sorted(NORMALISATION & set(parameters))
    if datatype == "UINT8" and normalised:
        raise ValueError(
            f"{normalised[0]} contradicts an output of TYPE_UINT8, whose pixels are not normalised"
        )
    if "scale" in parameters and len(normalised) > 1:
        raise ValueError(f"scale contradicts {' and '.join(name for name in normalised if name != 'scale')}")
    expanded = _preset(parameters) | dict(parameters)
    margin = next((name for name in ("pad_color", "pad_position") if name in parameters), "")
    if margin and expanded.get("resize") != "letterbox":
        raise ValueError(
            f"{margin} contradicts resize = {expanded.get('resize', 'shorter_side')}: expected letterbox"
        )
    if datatype == "UINT8":
        return {name: text for name, text in expanded.items() if name not in NORMALISATION}
    if "scale" in expanded:
        expanded["std"] = ", ".join([str(1 / _positive(expanded["scale"]))] * 3)
    return expanded


def _preset(parameters: Mapping[str, str]) -> dict[str, str]:
    name = parameters.get("preset")
    if name is None:
        return {}
    if name not in PRESETS:
        raise ValueError(f"preset: expected one of {', '.join(PRESETS)}, got '{name}'")
    replaced = {other for key in parameters for other in REPLACES.get(key, ())}
    preset = {key: text for key, text in PRESETS[name].items() if key not in replaced}
    if parameters.get("color_order") == "BGR":  # the presets list their numbers in the order R, G, B
        preset |= {
            key: ",".join(reversed(preset[key].split(","))) for key in ("mean", "std") if key in preset
        }
    return preset


def _positive(scale: str) -> float:
    try:
        value = float(scale)
    except ValueError:
        value = 0.0
    if not 0 < value < inf or 1 / value == inf:
        raise ValueError(f"scale: expected a positive number, got '{scale}'")
    return value
