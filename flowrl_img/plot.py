"""Small line plots with error bars as PNG, drawn with Pillow: curves of a run, scores over the guidance scale."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont

__all__ = ["Point", "plot", "ticks"]

WIDTH, HEIGHT, MARGIN, ZOOM = 360, 260, 46, 2  # pixels of a panel, before zooming
INK, GREY, LINE = "#222222", "#d8d8d8", "#1f6fb4"


@dataclass(frozen=True)
class Point:
    """A value with its interval; an interval of no width is not drawn."""

    x: float
    y: float
    low: float
    high: float


def plot(x_label: str, panels: Mapping[str, Sequence[Point]]) -> Image.Image:
    """One panel for each series, side by side, each with its own axes. Series: points in the order of x, none empty."""
    image = Image.new("RGB", (ZOOM * WIDTH * max(len(panels), 1), ZOOM * HEIGHT), "white")
    for k, (title, points) in enumerate(panels.items()):
        _Panel(ImageDraw.Draw(image), k * WIDTH, points).draw(title, x_label)
    return image


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers inside [low, high], about `about` of them."""
    if not high > low:
        return [low]
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough)
    first = math.ceil(low / step - 1e-9)
    return [round(k * step, 12) for k in range(first, math.floor(high / step + 1e-9) + 1)]


class _Panel:
    """Axes of one series."""

    def __init__(self, draw: ImageDraw.ImageDraw, left: int, points: Sequence[Point]) -> None:
        self.canvas, self.left, self.points = draw, left, points
        self.x = _range([p.x for p in points])
        self.y = _range([p.low for p in points] + [p.high for p in points])
        self.font = ImageFont.load_default(11 * ZOOM)

    def at(self, x: float, y: float) -> tuple[float, float]:
        across, up = (x - self.x[0]) / (self.x[1] - self.x[0]), (y - self.y[0]) / (self.y[1] - self.y[0])
        inner = WIDTH - 1.5 * MARGIN, HEIGHT - 2 * MARGIN
        return ZOOM * (self.left + MARGIN + across * inner[0]), ZOOM * (HEIGHT - MARGIN - up * inner[1])

    def draw(self, title: str, x_label: str) -> None:
        middle = ZOOM * (self.left + WIDTH / 2)
        self.canvas.text((middle, ZOOM * 14), title, fill=INK, font=self.font, anchor="mm")
        self.canvas.text((middle, ZOOM * (HEIGHT - 12)), x_label, fill=INK, font=self.font, anchor="mm")
        for y in ticks(*self.y):
            self.canvas.line([self.at(self.x[0], y), self.at(self.x[1], y)], fill=GREY, width=ZOOM)
            x, height = self.at(self.x[0], y)
            self.canvas.text((x - 5 * ZOOM, height), f"{y:g}", fill=INK, font=self.font, anchor="rm")
        for x in ticks(*self.x):
            place, bottom = self.at(x, self.y[0])
            self.canvas.line([(place, bottom), (place, bottom + 4 * ZOOM)], fill=INK, width=ZOOM)
            self.canvas.text((place, bottom + 12 * ZOOM), f"{x:g}", fill=INK, font=self.font, anchor="mm")
        self.canvas.line([self.at(self.x[0], self.y[0]), self.at(self.x[1], self.y[0])], fill=INK, width=ZOOM)
        self._series()

    def _series(self) -> None:
        self.canvas.line([self.at(p.x, p.y) for p in self.points], fill=LINE, width=2 * ZOOM)
        many = len(self.points) > 40  # a curve, where markers would hide the line
        for p in self.points:
            if p.high > p.low:
                self.canvas.line([self.at(p.x, p.low), self.at(p.x, p.high)], fill=LINE, width=ZOOM)
            x, y = self.at(p.x, p.y)
            r = 0 if many else 3 * ZOOM
            self.canvas.ellipse([x - r, y - r, x + r, y + r], fill=LINE)


def _range(values: Sequence[float]) -> tuple[float, float]:
    """A little more than the values take, never empty."""
    low, high = min(values), max(values)
    room = 0.05 * (high - low) or max(abs(high), 1.0) * 0.05
    return low - room, high + room
