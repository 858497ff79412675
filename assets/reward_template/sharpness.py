"""Sharpness: how much neighbouring pixels differ. Replace this by what your reward measures.

After `pip install -e .` it is `rewards: [{name: sharpness, gain: 2.0}]` in a recipe, and `flowrl-img rewards check
sharpness` says whether it keeps the rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from flowrl_img.rewards.known_answers import Better, Example, KnownAnswer
from flowrl_img.rewards.protocol import Metadata, RewardBatch, RewardOutput

__all__ = ["Sharpness"]


@dataclass(frozen=True)
class Sharpness:
    """The fields are the options in a recipe. Details go to the logs, one entry a row."""

    gain: float = 1.0

    name: ClassVar[str] = "sharpness"
    needs: ClassVar[frozenset[str]] = frozenset()  # metadata keys that every prompt must have

    def __post_init__(self) -> None:
        if self.gain <= 0:
            raise ValueError(f"sharpness gain must be above 0, got {self.gain}")

    def validate(self, prompts: Sequence[str], metadata: Sequence[Metadata]) -> None:
        """Called once when prompts are loaded: raise ValueError naming the first line that cannot be scored."""

    def known_answers(self) -> Sequence[KnownAnswer]:
        """Pictures whose scores you know. A run refuses to start when they come out otherwise. Optional."""
        flat = Example("a grey picture", np.full((16, 16, 3), 128, np.uint8))
        noise = Example("noise", np.random.default_rng(0).integers(0, 256, (16, 16, 3), np.uint8))
        return [Better((noise,), (flat,))]

    def __call__(self, batch: RewardBatch) -> RewardOutput:
        """batch.images: uint8 [B, H, W, 3]. A row that could not be scored is None or NaN, never 0."""
        pixels = batch.images.float() / 255
        steps = pixels.diff(dim=1).abs().mean(dim=(1, 2, 3)) + pixels.diff(dim=2).abs().mean(dim=(1, 2, 3))
        return RewardOutput.of((self.gain * steps).tolist(), {"brightness": pixels.mean(dim=(1, 2, 3)).tolist()})
