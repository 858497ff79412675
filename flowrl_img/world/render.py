"""Draw a scene: antialiased flat shapes on a dark gradient, or a sign with text, at 64 x 64."""

from __future__ import annotations

import math
from functools import cache, lru_cache

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from flowrl_img.world.scenes import SIZE, Scene, SceneObject, Sign
from flowrl_img.world.vocabulary import COLORS

__all__ = ["outline", "render", "shape_mask"]

OVERSAMPLE = 4
CELL = 13.5  # pixels from one sign character to the next
FONT_SIZE = 20  # pixels
RING_HOLE = 0.52


def render(scene: Scene) -> Image.Image:
    """RGB picture of `scene`, 64 x 64, uint8."""
    x = np.arange(SIZE)[None, :, None]
    y = np.arange(SIZE)[:, None, None]
    plane = np.array(scene.corner) + x * np.array(scene.slope_x) + y * np.array(scene.slope_y)
    picture = Image.fromarray(plane.round().clip(0, 255).astype(np.uint8), "RGB")
    for item in scene.objects:
        _paste_shape(picture, item)
    if scene.sign is not None:
        _paste_sign(picture, scene.sign)
    return picture


@cache
def outline(shape: str) -> tuple[tuple[float, float], ...]:
    """Corner points of a shape of radius 1 centred at 0, y down. Circles and rings are polygons of 64 corners."""
    match shape:
        case "circle" | "ring":
            return _regular(64)
        case "square":
            return ((-0.85, -0.85), (0.85, -0.85), (0.85, 0.85), (-0.85, 0.85))
        case "triangle":
            return ((0.0, -0.95), (1.0, 0.85), (-1.0, 0.85))
        case "diamond":
            return ((0.0, -1.0), (0.75, 0.0), (0.0, 1.0), (-0.75, 0.0))
        case "star":
            radii = [1.0 if k % 2 == 0 else 0.4 for k in range(10)]
            return tuple((r * math.sin(k * math.pi / 5), -r * math.cos(k * math.pi / 5)) for k, r in enumerate(radii))
        case "cross":
            w, e = 0.34, 1.0
            return (
                (-w, -e),
                (w, -e),
                (w, -w),
                (e, -w),
                (e, w),
                (w, w),
                (w, e),
                (-w, e),
                (-w, w),
                (-e, w),
                (-e, -w),
                (-w, -w),
            )
        case "heart":
            return _heart()
    raise ValueError(f"unknown shape {shape!r}")


def _regular(corners: int) -> tuple[tuple[float, float], ...]:
    angles = [2 * math.pi * k / corners for k in range(corners)]
    return tuple((math.sin(a), -math.cos(a)) for a in angles)


def _heart() -> tuple[tuple[float, float], ...]:
    points = []
    for k in range(64):
        a = 2 * math.pi * k / 64
        x = 16 * math.sin(a) ** 3
        y = 13 * math.cos(a) - 5 * math.cos(2 * a) - 2 * math.cos(3 * a) - math.cos(4 * a)
        points.append((x / 16.0, -(y + 2.5) / 14.5))
    return tuple(points)


def shape_mask(shape: str, size: tuple[int, int], x: float, y: float, r: float) -> Image.Image:
    """Coverage of the shape in [0, 255] on a grid of `size` pixels, centre (x, y), radius r, in pixels."""
    scale = OVERSAMPLE
    canvas = Image.new("L", (size[0] * scale, size[1] * scale), 0)
    draw = ImageDraw.Draw(canvas)
    draw.polygon([((x + r * px) * scale, (y + r * py) * scale) for px, py in outline(shape)], fill=255)
    if shape == "ring":
        hole = r * RING_HOLE
        draw.polygon([((x + hole * px) * scale, (y + hole * py) * scale) for px, py in outline(shape)], fill=0)
    return canvas.reduce(scale)


def _paste_shape(picture: Image.Image, item: SceneObject) -> None:
    left, top = int(item.x - item.r - 1), int(item.y - item.r - 1)
    side = int(2 * item.r + 4)
    mask = shape_mask(item.shape, (side, side), item.x - left, item.y - top, item.r)
    picture.paste(COLORS[item.color], (left, top), mask)


@lru_cache(maxsize=1)
def _font() -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(FONT_SIZE * OVERSAMPLE)


@cache
def _glyph(character: str) -> Image.Image:
    """Bold glyph mask in oversampled pixels, centred in a cell of (CELL + 2) x (FONT_SIZE + 4) pixels."""
    width, height = int((CELL + 2) * OVERSAMPLE), (FONT_SIZE + 4) * OVERSAMPLE
    glyph = Image.new("L", (width, height), 0)
    ImageDraw.Draw(glyph).text(
        (width / 2, height / 2), character, fill=255, font=_font(), anchor="mm", stroke_width=2, stroke_fill=255
    )
    return glyph


def _paste_sign(picture: Image.Image, sign: Sign) -> None:
    scale = OVERSAMPLE
    half_w, half_h = (len(sign.text) * CELL + 5) / 2, (FONT_SIZE + 4) / 2
    panel = Image.new("L", (SIZE * scale, SIZE * scale), 0)
    box = [c * scale for c in (sign.x - half_w, sign.y - half_h, sign.x + half_w, sign.y + half_h)]
    ImageDraw.Draw(panel).rounded_rectangle(box, radius=3 * scale, fill=255)
    picture.paste(sign.panel, (0, 0), panel.reduce(scale))
    ink = Image.new("L", (SIZE * scale, SIZE * scale), 0)
    for k, character in enumerate(sign.text):
        glyph = _glyph(character)
        centre = sign.x + (k - (len(sign.text) - 1) / 2) * CELL
        at = (round(centre * scale - glyph.width / 2), round(sign.y * scale - glyph.height / 2))
        ink.paste(255, at, glyph)
    picture.paste(sign.ink, (0, 0), ink.reduce(scale))
