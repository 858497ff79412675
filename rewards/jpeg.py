"""JPEG size: rewards pictures that compress well, or badly. Deterministic and cheap: the best smoke test of a run.

Size grows with the number of pixels, so values compare at one picture size only.
Source: arXiv 2305.13301 (compressibility, incompressibility); scale 1/500 kB as in Flow-GRPO's code.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from PIL import Image, features
from torch import Tensor

from flowrl_img.rewards.known_answers import Better, Example, KnownAnswer
from flowrl_img.rewards.pretrained import fingerprint
from flowrl_img.rewards.protocol import Metadata, RewardBatch, RewardOutput

__all__ = ["MODES", "Jpeg", "encoded_kb"]


def compressibility(kilobytes: float) -> float:
    """-kB / 500."""
    return -kilobytes / 500


def incompressibility(kilobytes: float) -> float:
    """The size itself, in kB."""
    return kilobytes


MODES: Mapping[str, Callable[[float], float]] = {
    "compressibility": compressibility,
    "incompressibility": incompressibility,
}


@dataclass(frozen=True)
class Jpeg:
    """quality: 1 to 95, as Pillow counts it. Details: `kilobytes`, in units of 1000 bytes."""

    mode: str = "compressibility"
    quality: int = 95

    name: ClassVar[str] = "jpeg"
    needs: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"jpeg mode must be one of {sorted(MODES)}, got {self.mode!r}")
        if not 1 <= self.quality <= 95:
            raise ValueError(f"jpeg quality must lie in 1..95, got {self.quality}")

    def validate(self, prompts: Sequence[str], metadata: Sequence[Metadata]) -> None:
        """Any prompt will do."""

    def known_answers(self) -> Sequence[KnownAnswer]:
        """Noise makes a larger file than one colour, so the two stand in the order of the mode."""
        flat = Example("a flat grey picture", np.full((64, 64, 3), 128, np.uint8))
        noise = Example("noise", np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8))
        small_is_good = MODES[self.mode](1.0) > MODES[self.mode](2.0)
        return [Better((flat,), (noise,)) if small_is_good else Better((noise,), (flat,))]

    @property
    def fingerprint(self) -> dict[str, str]:
        """The encoder, whose version moves sizes by a few percent."""
        return fingerprint({}, encoder=f"libjpeg {features.version('jpg')}", subsampling="4:2:0")

    def __call__(self, batch: RewardBatch) -> RewardOutput:
        """values: float32 [B]."""
        sizes = [encoded_kb(image, self.quality) for image in batch.images]
        return RewardOutput.of(map(MODES[self.mode], sizes), {"kilobytes": sizes})


def encoded_kb(image: Tensor, quality: int) -> float:
    """image: uint8 [H, W, 3]. Size of its JPEG in units of 1000 bytes, Pillow's default 4:2:0 subsampling."""
    buffer = io.BytesIO()
    Image.fromarray(image.numpy()).save(buffer, format="JPEG", quality=quality)
    return buffer.getbuffer().nbytes / 1000
