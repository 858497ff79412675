"""A classical detector for the embedded world: flat shapes on a dark linear gradient. It sees pixels only.

background   a plane per channel, fitted to the border pixels, robustly
foreground   pixels far from it, split into 8-connected components
coverage     a(p) = 1 - |p - c| / |c - background(p)|, c the component's colour: the share of a pixel that the object
             covers, exact for antialiased edges, low for pixels of any other colour
shape        soft IoU of the coverage, brought to unit area and zero centroid, with templates of the world's shapes
colour       nearest palette entry to the median of the fully covered pixels, or "unknown" when none is near
score        the IoU on a linear scale, less where another shape fits almost as well or where the edge is wide:
             crisp shapes lie above 0.9, blobs and noise below 0.3

Left out: objects that touch or overlap (the world has none) are not taken apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from flowrl_img.rewards.geneval.detection import Box, Detection, Picture
from flowrl_img.rewards.protocol import Metadata
from flowrl_img.world import COLORS, SHAPES, render, scene_for, shape_mask

__all__ = ["UNKNOWN", "Scenes", "background_plane", "fit_score", "shape_ious", "sharpness"]

UNKNOWN = "unknown"

Array = NDArray[np.floating]

BORDER = 2  # pixels at each side taken as background; the world keeps objects 2.5 px away
CONTRAST = 60.0  # RGB distance in 8-bit levels, of a foreground pixel from the background; the palette is over 110 away
GAP_DEPTH = 0.4  # and in units of the largest distance within 2 px: parts bright objects whose soft edges meet
MIN_AREA = 25  # pixels; the smallest star has 57
GRID, REACH = 32, 1.1  # samples a side of a normalised shape, and its half side in units of the root of its area
TEMPLATE_RADII = (7.0, 9.5, 13.0)  # pixels: the width of an edge relative to the shape varies with these
TEMPLATE_BLURS = (0.0, 0.7)  # pixels (sigma): crisp, and as soft as an autoencoder leaves it
COVERED = 0.8  # coverage of an inner pixel
NEAR = 80.0  # RGB distance; the two nearest palette entries are 95 apart
WORST, BEST = 0.80, 0.90  # IoU that maps to score 0 and 1; true shapes lie above 0.92, the next shape below 0.86
LEAD = 0.08  # IoU by which a shape must lead over the next for its full score; true shapes lead by 0.11 or more

NARROW, WIDE = 2.2, 3.4  # pixels: edges of full score and of none; the world has 0.7, a blur of sigma 3 has 3.4


@dataclass(frozen=True)
class Scenes:
    """Detector and colour classifier of the embedded world."""

    name: ClassVar[str] = "scenes"
    classes: ClassVar[Sequence[str]] = SHAPES
    colors: ClassVar[Sequence[str]] = tuple(COLORS)

    def detect(self, images: Sequence[Picture]) -> list[list[Detection]]:
        """images: uint8 [H, W, 3] RGB each. Every component that resembles a shape at all (score > 0)."""
        return [list(_detections(image.astype(np.float32))) for image in images]

    def known_pictures(self) -> Sequence[tuple[Picture, Metadata]]:
        """Drawn scenes: one of counts, one of colours and a position."""
        rows: list[Metadata] = [
            {"tag": "counting", "include": [{"class": "heart", "count": 3}]},
            {
                "tag": "position",
                "include": [
                    {"class": "ring", "count": 1, "color": "red"},
                    {"class": "star", "count": 1, "color": "cyan", "position": ["above", 0]},
                ],
            },
        ]
        return [(np.asarray(render(scene_for(row, np.random.default_rng(0)))), row) for row in rows]

    def classify(self, image: Picture, detections: Sequence[Detection], label: str) -> list[str]:
        """Palette name of each detection, or "unknown"."""
        return [_color_name(image, found) for found in detections]


def background_plane(picture: Array) -> Array:
    """picture: [H, W, 3] levels. The background [H, W, 3]: per channel a + b x + c y, fitted to the border.

    Refitted to the half of the border nearest to the last fit, so that an object at the border does not bend it.
    """
    height, width = picture.shape[:2]
    basis, border = _plane_basis(height, width)
    rows, seen = basis[border], picture[border]
    keep = np.argsort(np.abs(seen - np.median(seen, axis=0)).sum(axis=1))[: int(0.8 * len(seen))]
    for share in (0.7, 0.6):
        plane = np.linalg.lstsq(rows[keep], seen[keep], rcond=None)[0]
        distance = np.abs(seen - rows @ plane).sum(axis=1)
        keep = np.argsort(distance)[: int(share * len(seen))]
    plane = np.linalg.lstsq(rows[keep], seen[keep], rcond=None)[0]
    return (basis @ plane).astype(np.float32)


@lru_cache(maxsize=8)
def _plane_basis(height: int, width: int) -> tuple[Array, NDArray[np.bool_]]:
    """[H, W, 3] of (1, x, y), x and y in [-1, 1]; bool [H, W] of the border."""
    y, x = np.meshgrid(np.linspace(-1, 1, height), np.linspace(-1, 1, width), indexing="ij")
    border = np.ones((height, width), dtype=bool)
    border[BORDER:-BORDER, BORDER:-BORDER] = False
    return np.stack([np.ones_like(x), x, y], axis=-1).astype(np.float32), border


def _detections(picture: Array) -> Iterator[Detection]:
    from scipy import ndimage

    offset = picture - background_plane(picture)
    distance = np.sqrt((offset**2).sum(axis=-1))
    least = np.maximum(CONTRAST, GAP_DEPTH * ndimage.maximum_filter(distance, size=5))
    labels, _ = ndimage.label(distance > least, structure=np.ones((3, 3)))
    for index, window in enumerate(ndimage.find_objects(labels), start=1):
        inside = labels[window] == index
        if inside.sum() < MIN_AREA:
            continue
        window = _padded(window, labels.shape)
        own = np.isin(labels[window], (0, index))
        coverage = _coverage(offset[window], distance[window], labels[window] == index) * own
        if coverage.sum() < MIN_AREA:
            continue
        ious = shape_ious(coverage)
        score = fit_score(ious) * sharpness(coverage)
        if score > 0:
            yield Detection(SHAPES[int(ious.argmax())], score, *_extent(coverage, window, labels.shape))


def fit_score(ious: Array) -> float:
    """ious: [8]. Quality in [0, 1] of the best fit."""
    second, best = np.sort(ious)[-2:]
    return float(np.clip((best - WORST) / (BEST - WORST), 0, 1) * np.clip((best - second) / LEAD, 0, 1))


def sharpness(coverage: Array) -> float:
    """1 for the edges of the world, 0 for heavy blur, from the mean width of the edge in pixels.

    Width = sum 4 a (1 - a) / sum |grad a|: the total variation of a blurred edge is still its length.
    """
    slopes = np.gradient(coverage)
    width = (4 * coverage * (1 - coverage)).sum() / np.hypot(*slopes).sum()
    return float(np.clip((WIDE - width) / (WIDE - NARROW), 0, 1))


def _padded(window: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[slice, slice]:
    """The window with one more pixel at each side, for the faint part of edges."""
    rows, columns = (slice(max(s.start - 1, 0), min(s.stop + 1, n)) for s, n in zip(window, shape, strict=True))
    return rows, columns


def _coverage(offset: Array, distance: Array, inside: NDArray[np.bool_]) -> Array:
    """offset: [h, w, 3] from the background, distance: its length. Coverage [h, w] in [0, 1] by the object's colour.

    The colour is the median over the half of the object farthest from the background.
    """
    core = inside & (distance >= np.median(distance[inside]))
    color = np.median(offset[core], axis=0)
    return _stretched(1 - np.sqrt(((offset - color) ** 2).sum(axis=-1)) / np.sqrt((color**2).sum()))


def _stretched(coverage: Array) -> Array:
    """A tenth at both ends cut off: takes away noise on flat parts."""
    return np.clip((coverage - 0.1) / 0.8, 0, 1)


def _extent(coverage: Array, window: tuple[slice, slice], shape: tuple[int, ...]) -> tuple[Box, NDArray[np.bool_]]:
    """Box and mask, in the whole picture, of the pixels that are at least half covered."""
    mask = np.zeros(shape, dtype=bool)
    mask[window] = coverage >= 0.5
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    return (float(columns[0]), float(rows[0]), float(columns[-1] + 1), float(rows[-1] + 1)), mask


def shape_ious(coverage: Array) -> Array:
    """coverage: [h, w] in [0, 1]. Soft IoU, sum min / sum max, with each of SHAPES: [8]."""
    sample, templates = _normalised(coverage), _templates()
    ious = np.minimum(sample, templates).sum(axis=(-2, -1)) / np.maximum(sample, templates).sum(axis=(-2, -1))
    return ious.max(axis=1)


def _normalised(coverage: Array) -> Array:
    """The coverage sampled (bilinear) on a GRID x GRID frame with its centroid in the middle and unit area."""
    from scipy import ndimage

    area = coverage.sum()
    y, x = np.arange(coverage.shape[0]), np.arange(coverage.shape[1])
    center_y, center_x = coverage.sum(axis=1) @ y / area, coverage.sum(axis=0) @ x / area
    steps = np.linspace(-REACH, REACH, GRID) * np.sqrt(area)
    where = np.meshgrid(center_y + steps, center_x + steps, indexing="ij")
    return ndimage.map_coordinates(coverage, where, order=1, mode="constant").astype(np.float32)


@lru_cache(maxsize=1)
def _templates() -> Array:
    """[8 shapes, radii x blurs, GRID, GRID]: the world's shapes, normalised."""
    bank = [[_template(shape, r, blur) for r in TEMPLATE_RADII for blur in TEMPLATE_BLURS] for shape in SHAPES]
    return np.array(bank, dtype=np.float32)


def _template(shape: str, radius: float, blur: float) -> Array:
    """[GRID, GRID], the mean over where the pixel grid may fall."""
    from scipy import ndimage

    side = int(2 * radius * 1.3) + 8
    middles = [(side / 2 + dx, side / 2 + dy) for dx in (0.0, 0.5) for dy in (0.0, 0.5)]
    drawn = [np.asarray(shape_mask(shape, (side, side), x, y, radius), np.float32) / 255 for x, y in middles]
    return np.mean([_normalised(_stretched(ndimage.gaussian_filter(mask, blur))) for mask in drawn], axis=0)


def _color_name(image: Picture, found: Detection) -> str:
    """Nearest palette entry to the median over the object's inner pixels."""
    from scipy import ndimage

    if found.mask is None:
        raise ValueError("the colour of an object is read inside its mask, and this detector gives none")
    inner = ndimage.binary_erosion(found.mask)
    pixels = image[inner if inner.sum() >= 5 else found.mask]
    distances = np.linalg.norm(np.array(list(COLORS.values())) - np.median(pixels, axis=0), axis=1)
    nearest = int(distances.argmin())
    return list(COLORS)[nearest] if distances[nearest] <= NEAR else UNKNOWN
