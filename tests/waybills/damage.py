"""What happens to a label before it is read: stamps, folds, bad print, the camera and JPEG."""

from random import Random

import numpy as np
from PIL import Image, ImageChops, ImageDraw, ImageFilter

from tests.pictures import save
from tests.waybills.paper import Paper, font, rectangle

# Channels are RGB.
BACKGROUNDS = ((168, 128, 88), (120, 118, 115), (60, 58, 62), (200, 196, 190), (150, 110, 70))
STAMP_INKS = ((180, 30, 40), (40, 50, 150), (90, 40, 120))
STAMPS = ("RECEIVED", "CHECKED", "PRIORITY", "已验视", "已安检", "PAID")


def bad_print(paper: Paper, draw: Random) -> None:
    """Leave out thin columns and dots, as a worn thermal head does, or make the print faint."""
    kind = draw.random()
    levels = np.asarray(paper.image).astype(np.int16)
    noise = np.random.default_rng(draw.getrandbits(32))
    if kind < 0.25:
        for _ in range(draw.randint(1, 5)):
            start = draw.randrange(paper.width - 4)
            levels[:, start : start + draw.randint(1, 3)] = 250
    elif kind < 0.4:
        levels[noise.random(levels.shape) < draw.uniform(0.02, 0.1)] = 245
    elif kind < 0.6:
        levels = 252 - (252 - levels) * draw.uniform(0.3, 0.7)
    paper.image = Image.fromarray(np.clip(levels, 0, 255).astype(np.uint8))


def stamped(paper: Paper, draw: Random) -> Image.Image:
    """Return the label in colour, perhaps with a stamp or a stroke of a pen over its text."""
    colour = paper.image.convert("RGB")
    if draw.random() < 0.45:
        ink, size = draw.choice(STAMP_INKS), draw.randint(150, 260)
        mark = Image.new("RGB", (size, size), "white")
        pen, text = ImageDraw.Draw(mark), draw.choice(STAMPS)
        pen.ellipse((4, 4, size - 5, size - 5), outline=ink, width=draw.randint(3, 6))
        pen.text((size / 2, size / 2), text, fill=ink, font=font("chinese", size // 6), anchor="mm")
        mark = mark.rotate(draw.uniform(-40, 40), fillcolor="white", resample=Image.Resampling.BICUBIC)
        left, top = draw.randint(0, paper.width - size), draw.randint(0, paper.height - size)
        area = (left, top, left + size, top + size)
        colour.paste(ImageChops.multiply(colour.crop(area), mark), area)
        inside = size * 0.12
        corners = rectangle(left + inside, top + inside, left + size - inside, top + size - inside)
        paper.ignored.append(corners)
    if draw.random() < 0.2:
        start = np.array([draw.randint(0, paper.width), draw.randint(0, paper.height)])
        turns = np.cumsum([[draw.uniform(-60, 90), draw.uniform(-40, 40)] for _ in range(6)], axis=0)
        points = [tuple(point) for point in (start + turns).tolist()]
        ImageDraw.Draw(colour).line(points, fill=(30, 40, 130), width=3)
    return colour


def folded(label: Image.Image, draw: Random) -> Image.Image:
    """Return the label with folds and dents as bands of light and shade."""
    width, height = label.size
    y, x = np.mgrid[0:height, 0:width].astype(np.float32)
    light = np.ones((height, width), np.float32)
    for _ in range(draw.choice((0, 0, 1, 2, 3))):
        angle, offset = draw.uniform(-0.5, 0.5) + draw.choice((0, np.pi / 2)), draw.uniform(0.1, 0.9)
        across = (x - offset * width) * np.sin(angle) + (y - offset * height) * np.cos(angle)
        depth, reach = draw.uniform(0.1, 0.4), draw.uniform(15, 70)
        light *= 1 - depth * np.exp(-np.abs(across) / reach) * (across > 0)
        light += depth * 0.4 * np.exp(-((across / 3) ** 2))
    return _lit(label, light)


def photographed(label: Image.Image, draw: Random) -> tuple[Image.Image, np.ndarray]:
    """Return a photo of the label on a table, and the homography [3, 3] from the label's pixels to it."""
    scale = draw.choice((1.0, 0.85, 0.7, 0.6, 0.5, 0.42)) * draw.uniform(0.9, 1.05)
    width, height = (round(side * scale) for side in label.size)
    label = label.resize((width, height), Image.Resampling.LANCZOS)
    margin = draw.uniform(0.03, 0.14)
    size = np.array([width * (1 + 2 * margin), height * (1 + 2 * margin)])
    tilt = draw.choice((0.0, 0.01, 0.03, 0.06))
    corners = rectangle(0, 0, width, height)
    wobble = np.array([[draw.uniform(-tilt, tilt) for _ in range(2)] for _ in range(4)]) * (width, height)
    angle = np.deg2rad(draw.choice((0.0, 1.0, 3.0, 7.0)) * draw.uniform(-1, 1))
    turn = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
    placed = (corners + wobble - corners.mean(axis=0)) @ turn + size / 2
    photo_size = (round(size[0]), round(size[1]))
    to_photo = homography(corners, placed)
    back = np.linalg.inv(to_photo)
    coefficients = (back / back[2, 2]).ravel()[:8].tolist()
    warp = {"method": Image.Transform.PERSPECTIVE, "data": coefficients, "resample": Image.Resampling.BICUBIC}
    mask = Image.new("L", label.size, 255).transform(photo_size, **warp)
    photo = _table(photo_size, draw)
    photo.paste(label.transform(photo_size, **warp), mask=mask)
    return _shaded(photo, draw), to_photo @ np.diag([scale, scale, 1.0])


def recorded(photo: Image.Image, draw: Random) -> bytes:
    """Return the photo as JPEG, blurred and with the noise of a sensor."""
    kind = draw.random()
    if kind < 0.4:
        photo = photo.filter(ImageFilter.GaussianBlur(draw.uniform(0.5, 2.0)))
    elif kind < 0.6:
        photo = _shaken(photo, draw.randint(3, 7), is_level=draw.random() < 0.5)
    levels = np.asarray(photo).astype(np.float32)
    noise = np.random.default_rng(draw.getrandbits(32))
    sigma = draw.choice((0.0, 3.0, 7.0, 14.0, 22.0))
    levels += noise.standard_normal(levels.shape, np.float32) * sigma
    gain = draw.uniform(0.75, 1.1)
    levels = (levels - 128) * draw.uniform(0.6, 1.05) + 128 * gain
    quality = draw.choice((25, 40, 60, 75, 90))
    return save(Image.fromarray(np.clip(levels, 0, 255).astype(np.uint8)), "JPEG", quality=quality)


def homography(source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Return the matrix float64[3, 3] that maps four points [4, 2] to four others."""
    rows, values = [], []
    for (x, y), (u, v) in zip(source, target, strict=True):
        rows += [[x, y, 1, 0, 0, 0, -u * x, -u * y], [0, 0, 0, x, y, 1, -v * x, -v * y]]
        values += [u, v]
    return np.append(np.linalg.solve(np.array(rows), np.array(values)), 1.0).reshape(3, 3)


def mapped(matrix: np.ndarray, points: np.ndarray) -> np.ndarray:
    flat = np.column_stack([points, np.ones(len(points))]) @ matrix.T
    result: np.ndarray = flat[:, :2] / flat[:, 2:]
    return result


def _table(size: tuple[int, int], draw: Random) -> Image.Image:
    """Return a table or a box with a grain."""
    noise = np.random.default_rng(draw.getrandbits(32))
    coarse = Image.fromarray(noise.integers(0, 256, (9, 7), np.uint8)).resize(size, Image.Resampling.BICUBIC)
    fine = noise.standard_normal((size[1], size[0]), np.float32) * 5
    grain = np.asarray(coarse, np.float32) / 255 * 40 - 20 + fine
    levels = np.array(draw.choice(BACKGROUNDS), np.float32) + grain[..., None]
    return Image.fromarray(np.clip(levels, 0, 255).astype(np.uint8))


def _shaded(photo: Image.Image, draw: Random) -> Image.Image:
    """Return the photo with light from one side, and perhaps the edge of a shadow or a reflection."""
    width, height = photo.size
    y, x = np.mgrid[0:height, 0:width].astype(np.float32)
    angle = draw.uniform(0, 2 * np.pi)
    across = (x / width - 0.5) * np.cos(angle) + (y / height - 0.5) * np.sin(angle)
    light = 1 + across * draw.uniform(0, 0.5)
    kind = draw.random()
    if kind < 0.25:
        edge, soft = draw.uniform(-0.3, 0.3), draw.uniform(0.005, 0.08)
        light *= 1 - draw.uniform(0.2, 0.55) / (1 + np.exp(np.clip((edge - across) / soft, -50, 50)))
    elif kind < 0.35:
        center = np.array([draw.uniform(0.2, 0.8) * width, draw.uniform(0.2, 0.8) * height])
        reach = draw.uniform(0.08, 0.2) * width
        far = ((x - center[0]) ** 2 + (y - center[1]) ** 2) / reach**2
        levels = np.asarray(photo).astype(np.float32)
        levels += (draw.uniform(80, 200) * np.exp(-far))[..., None]
        photo = Image.fromarray(np.clip(levels, 0, 255).astype(np.uint8))
    return _lit(photo, light)


def _lit(image: Image.Image, light: np.ndarray) -> Image.Image:
    levels = np.asarray(image).astype(np.float32) * light[..., None]
    return Image.fromarray(np.clip(levels, 0, 255).astype(np.uint8))


def _shaken(photo: Image.Image, length: int, is_level: bool) -> Image.Image:
    """Return the mean of shifted photos: a hand that moved."""
    levels = np.asarray(photo).astype(np.float32)
    shifted = [np.roll(levels, shift, axis=int(is_level)) for shift in range(length)]
    return Image.fromarray((sum(shifted) / length).astype(np.uint8))
