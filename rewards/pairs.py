"""Scores of (picture, prompt) pairs from two encoders: the part that PickScore, HPSv2 and CLIPScore share.

Row i of the pictures meets row i of the prompts and no other: no B x B table is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from flowrl_img.rewards.neural import full_precision, output_of, scoring
from flowrl_img.rewards.pixels import Pixels
from flowrl_img.rewards.protocol import RewardBatch, RewardOutput

__all__ = ["Formula", "TwoTowers", "cosine", "differentiable_pairs", "score_pairs"]

Formula = Callable[[Tensor, Tensor], Tensor]  # unit rows [B, D] of pictures and of prompts -> [B]


class TwoTowers(Protocol):
    """Encoders of pictures and prompts into one space."""

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        ...

    @property
    def pixels(self) -> Pixels:
        """The preprocessing of pictures."""
        ...

    def embed_pixels(self, pixels: Tensor) -> Tensor:
        """pixels: float32 [B, 3, size, size]. Unit rows [B, D]."""
        ...

    def embed_prompts(self, prompts: Sequence[str]) -> tuple[Tensor, list[bool]]:
        """Unit rows [B, D], and which prompts were cut."""
        ...


def cosine(pictures: Tensor, prompts: Tensor) -> Tensor:
    """Row by row. [B]"""
    return (pictures * prompts).sum(-1)


def score_pairs(towers: TwoTowers, batch: RewardBatch, formula: Formula) -> RewardOutput:
    """float32 values [B] without gradients. Details: `truncated`."""
    with scoring(towers.device):
        pictures = towers.embed_pixels(towers.pixels.pictures(batch.images).to(towers.device))
        prompts, cut = _embed(towers, batch.prompts)
        return output_of(formula(pictures, prompts), cut)


def differentiable_pairs(towers: TwoTowers, images: Tensor, prompts: Sequence[str], formula: Formula) -> Tensor:
    """images: float [B, 3, H, W] in [0, 1]. float32 [B] with gradients to the images alone."""
    with full_precision(towers.device):
        pictures = towers.embed_pixels(towers.pixels.floats(images.to(towers.device)))
        with torch.no_grad():
            embedded, _ = _embed(towers, prompts)
        return formula(pictures, embedded)


def _embed(towers: TwoTowers, prompts: Sequence[str]) -> tuple[Tensor, list[bool]]:
    """Each distinct prompt is encoded once: the pictures of a group share theirs."""
    distinct = list(dict.fromkeys(prompts))
    place = {prompt: row for row, prompt in enumerate(distinct)}
    rows = [place[prompt] for prompt in prompts]
    embedded, cut = towers.embed_prompts(distinct)
    return embedded[rows], [cut[row] for row in rows]
