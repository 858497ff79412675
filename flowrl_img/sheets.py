"""Contact sheets: pictures of the same prompts side by side, with their numbers below."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

__all__ = ["Group", "contact_sheet", "to_picture"]

GAP, GUTTER, LINE, TOP = 2, 8, 17, 30  # pixels
ACROSS = 6  # pictures in a row, where groups are smaller


@dataclass(frozen=True)
class Group:
    """Pictures that belong together, float [3, H, W] in [0, 1] each, and lines of text below them."""

    images: Sequence[Tensor]
    lines: Sequence[str]


def to_picture(image: Tensor) -> Image.Image:
    """float [3, H, W] in [0, 1] -> 8 bit."""
    return Image.fromarray((image.permute(1, 2, 0) * 255).round().clamp(0, 255).byte().cpu().numpy())


def contact_sheet(title: str, groups: Sequence[Group], labels: Sequence[str] = (), *, cell: int = 160) -> Image.Image:
    """All groups as one picture. labels: one over each picture of a group; cell: side of a picture in pixels.

    Groups are of equal size, and as many stand in a row as keep it near six pictures wide.
    """
    size = max((len(group.images) for group in groups), default=1)
    text = max((len(group.lines) for group in groups), default=0)
    columns = max(1, ACROSS // size)
    head = LINE if labels else 0
    width, height = size * (cell + GAP), head + cell + text * LINE + GUTTER
    rows = -(-len(groups) // columns)
    sheet = Image.new("RGB", (columns * (width + GUTTER) + GUTTER, TOP + rows * (height + GUTTER)), "white")
    draw, font, small = ImageDraw.Draw(sheet), ImageFont.load_default(14), ImageFont.load_default(12)
    draw.text((GUTTER, 7), title, fill="black", font=font)
    letters = max(width // 7, 20)
    for k, group in enumerate(groups):
        x, y = GUTTER + (k % columns) * (width + GUTTER), TOP + (k // columns) * (height + GUTTER)
        for place, image in enumerate(group.images):
            left = x + place * (cell + GAP)
            if labels:
                draw.text((left, y), labels[place], fill="black", font=small)
            sheet.paste(to_picture(image).resize((cell, cell), Image.Resampling.LANCZOS), (left, y + head))
        for number, line in enumerate(group.lines):
            at = (x, y + head + cell + 3 + number * LINE)
            draw.text(at, textwrap.shorten(line, letters, placeholder=" ..."), fill="black", font=small)
    return sheet
