"""What a detector gives and what it must offer, so that GenEval's logic knows no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from flowrl_img.rewards.protocol import Metadata

__all__ = ["Box", "ColorClassifier", "Detection", "Detector", "KnowsPictures", "Picture", "box_iou"]

Box = tuple[float, float, float, float]
Picture = NDArray[np.uint8]


@dataclass(frozen=True)
class Detection:
    """box: (x0, y0, x1, y1) in pixels, y down; score in [0, 1]; mask: bool [H, W] of the whole picture, where known.

    Example: Detection("ring", 0.97, (10.0, 12.0, 30.0, 32.0))
    """

    label: str
    score: float
    box: Box
    mask: NDArray[np.bool_] | None = None


class Detector(Protocol):
    """Finds objects of its classes."""

    @property
    def classes(self) -> Sequence[str]:
        """Every label that `detect` may give."""
        ...

    def detect(self, images: Sequence[Picture]) -> list[list[Detection]]:
        """images: uint8 [H, W, 3] RGB each. One list of detections a picture, of any score and order."""
        ...


@runtime_checkable
class KnowsPictures(Protocol):
    """A detector that can be checked at start-up; optional, and the way to notice weights that did not load."""

    def known_pictures(self) -> Sequence[tuple[Picture, Metadata]]:
        """Pictures that show exactly what their metadata (`tag`, `include`) ask for."""
        ...


class ColorClassifier(Protocol):
    """Names the colour of detected objects."""

    @property
    def colors(self) -> Sequence[str]:
        """Every name that `classify` may give."""
        ...

    def classify(self, image: Picture, detections: Sequence[Detection], label: str) -> list[str]:
        """image: uint8 [H, W, 3] RGB. One colour name for each detection, all of class `label`."""
        ...


def box_iou(a: Box, b: Box) -> float:
    """Intersection over union in GenEval's convention: a box covers its last pixel, so sides are x1 - x0 + 1."""

    def area(x0: float, y0: float, x1: float, y1: float) -> float:
        return max(x1 - x0 + 1, 0) * max(y1 - y0 + 1, 0)

    shared = area(max(a[0], b[0]), max(a[1], b[1]), min(a[2], b[2]), min(a[3], b[3]))
    return shared / (area(*a) + area(*b) - shared)
