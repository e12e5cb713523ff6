"""The difference between our preprocessing and Pillow on real photos: in levels of 255, and in scores.

python -m loadtest.parity [--wallpapers FOLDER] [--record parity]

The reference decodes the whole image and resizes it with Pillow's antialiased bilinear filter. Each photo
is compared as a JPEG at its own size, for each step between the naive way and ours.
"""

import io
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.resources import files
from pathlib import Path

import numpy as np
from PIL import Image

from loadtest import record
from nereid.assets import REPOSITORY
from nereid.config.model_config import ModelConfig
from nereid.imaging.buffers import Buffers
from nereid.imaging.decode import EncodedImage, open_image
from nereid.imaging.preprocess_settings import PreprocessSettings
from nereid.imaging.resample import Axis, build_axis, resample
from nereid.imaging.transform import Transform, make_plan
from nereid.inference.session import Session
from tools.export import photos as wallpapers

JPEG_QUALITY = 92
# All photos in these packages, without charts, silhouettes and pages of text.
PHOTOS = {
    "skimage": [
        f"data/{name}"
        for name in (
            *("astronaut.png", "brick.png", "camera.png", "chelsea.png", "coffee.png", "coins.png"),
            *("grass.png", "gravel.png", "hubble_deep_field.jpg", "ihc.png", "moon.png"),
            *("motorcycle_left.png", "retina.jpg", "rocket.jpg"),
        )
    ],
    "sklearn": ["datasets/images/china.jpg", "datasets/images/flower.jpg"],
    "matplotlib": ["mpl-data/sample_data/grace_hopper.jpg"],
}
HEADINGS = (
    *("step", "photos", "mean levels", "worst photo's", "top-1 differs"),
    "its probability moves by up to",
)
markdown = partial(record.markdown, HEADINGS)
Levels = np.ndarray
Way = Callable[[EncodedImage, Transform], Levels]


@dataclass(frozen=True, slots=True)
class Judgement:
    """One photo and one way: mean difference in levels of 255, and the network's scores.

    `change` is the change in the probability of the reference's best class.
    """

    photo: str
    shrink: int
    reference_probability: float
    difference: float
    is_top1_equal: bool
    change: float


def packaged() -> list[Path]:
    """List the photos of the packages in PHOTOS."""
    return [Path(str(files(package) / name)) for package, names in PHOTOS.items() for name in names]


def as_jpeg(photo: Path) -> bytes:
    """Return the file if it is a JPEG, else its pixels as a JPEG."""
    if photo.suffix == ".jpg":
        return photo.read_bytes()
    encoded = io.BytesIO()
    with Image.open(photo) as image:
        image.convert("RGB").save(encoded, "JPEG", quality=JPEG_QUALITY)
    return encoded.getvalue()


def pillow(image: EncodedImage, transform: Transform) -> Levels:
    """Compute the reference with Pillow alone, from all pixels."""
    whole = Image.open(io.BytesIO(image.encoded)).convert("RGB")
    rows, columns = (placement.span for placement in transform.place(image.size_wh))
    resized = whole.resize((columns.resized, rows.resized), Image.Resampling.BILINEAR)
    box = (columns.offset, rows.offset, columns.offset + columns.count, rows.offset + rows.count)
    return np.asarray(resized.crop(box), np.float32).transpose(2, 0, 1)


def whole(image: EncodedImage, transform: Transform) -> Levels:
    """Decode all pixels, then resample as the library does."""
    return _by_plan(image, transform, max_shrink=1)


def ours(image: EncodedImage, transform: Transform, margin: float) -> Levels:
    """Resample as the library does with a `decode_margin`."""
    return _by_plan(image, replace(transform, decode_margin=margin), image.max_shrink)


def naive(image: EncodedImage, transform: Transform, antialias: bool) -> Levels:
    """Decode scaled, then treat the result as the image."""
    plan = make_plan(replace(transform, decode_margin=1.0), image.size_wh, 1, image.max_shrink)
    pixels = image.pixels(plan.shrink, transform.background_color, Buffers())
    placed = transform.place(image.size_wh)
    axes = (
        build_axis(replace(placement.span, source=extent), transform.interpolation, antialias)
        for placement, extent in zip(placed, pixels.shape, strict=False)
    )
    return _resampled(pixels, *axes)


WHOLE, DEFAULT = "all pixels, our resampling", "the same, decode_margin 1.05 (the default)"
WAYS: dict[str, Way] = {
    WHOLE: whole,
    "scaled decode, plain bilinear": partial(naive, antialias=False),
    "scaled decode, antialiased bilinear": partial(naive, antialias=True),
    "scaled decode, pixels estimated from averages": partial(ours, margin=1.0),
    DEFAULT: partial(ours, margin=1.05),
    "the same, decode_margin 1.25": partial(ours, margin=1.25),
    "the same, decode_margin 2": partial(ours, margin=2.0),
}


def judge(
    way: Way, jpegs: Mapping[str, bytes], settings: PreprocessSettings, session: Session
) -> Iterator[Judgement]:
    """Compare each photo with the reference."""
    transform = settings.transform
    for name, jpeg in jpegs.items():
        image = open_image(jpeg, settings.limits)
        expected, got = pillow(image, transform), way(image, transform)
        before, after = (_scores(session, transform, levels) for levels in (expected, got))
        best = int(before.argmax())
        shrink = make_plan(transform, image.size_wh, image.orientation, image.max_shrink).shrink
        difference = float(np.abs(got - expected).mean())
        change = float(after[best] - before[best])
        is_equal = best == int(after.argmax())
        yield Judgement(name, shrink, float(before[best]), difference, is_equal, change)


def _summary(step: str, judgements: Sequence[Judgement]) -> tuple[str, ...]:
    differences = [judgement.difference for judgement in judgements]
    return (
        step,
        str(len(judgements)),
        f"{statistics.mean(differences):.3f}",
        f"{max(differences):.2f}",
        str(sum(not judgement.is_top1_equal for judgement in judgements)),
        f"{max(abs(judgement.change) for judgement in judgements):.3f}",
    )


def _by_plan(image: EncodedImage, transform: Transform, max_shrink: int) -> Levels:
    plan = make_plan(transform, image.size_wh, 1, max_shrink)
    pixels = image.pixels(plan.shrink, transform.background_color, Buffers())
    return _resampled(pixels, plan.rows, plan.columns)


def _resampled(pixels: np.ndarray, rows: Axis, columns: Axis) -> Levels:
    return np.stack([plane.copy() for plane in resample(pixels, rows, columns, Buffers())])


def _scores(session: Session, transform: Transform, levels: Levels) -> np.ndarray:
    mean, std = (np.array(values, np.float32)[:, None, None] for values in (transform.mean, transform.std))
    scores: np.ndarray = session.run({"input": ((levels - mean) / std)[None]}, ["scores"])[0][0]
    return scores


def main() -> int:
    """Compare each step on each photo, print and record the result."""
    parser = record.parser(__doc__)
    parser.add_argument(
        "--wallpapers", type=Path, help="folder for Debian's wallpapers, compared in addition"
    )
    args = record.parsed(parser)
    sets = [packaged()]
    if args.wallpapers:
        wallpapers.fetch(args.wallpapers)
        more = wallpapers.held_out(args.wallpapers) + wallpapers.calibration(args.wallpapers)
        sets.append(list(dict.fromkeys([*packaged(), *more])))
    config = ModelConfig.from_file(REPOSITORY / "imagenet_preprocess", 1)
    settings = PreprocessSettings.from_config(config)
    session = Session.from_config(ModelConfig.from_file(REPOSITORY / "efficientnet_lite0", 1))
    rows, judged = [], {}
    for photos in sets:
        jpegs = {photo.name: as_jpeg(photo) for photo in photos}
        judged = {step: list(judge(way, jpegs, settings, session)) for step, way in WAYS.items()}
        rows += [_summary(step, judgements) for step, judgements in judged.items()]
    record.show(HEADINGS, rows)
    return record.finish(args.record, {"rows": rows, "photos": [asdict(each) for each in judged[DEFAULT]]})


if __name__ == "__main__":
    record.end(main)
