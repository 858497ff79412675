"""Captions that are wrong now and then, as those of the web are, for the last stage of pre-training.

A model that learns from them draws the wrong thing at times although it could draw the right one, as large models do:
that is what a reward can improve. A wrong caption never names a combination that is held out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowrl_img.pico.wrong_captions import kinds_in, stated, wrong_caption
from flowrl_img.world.splits import color_split, pair_split, text_split

__all__ = ["SHARES", "CaptionNoise", "is_trained"]

SHARES: Mapping[str, float] = MappingProxyType({"color": 0.72, "count": 0.45, "relation": 0.45, "letter": 0.6})
TRIES = 20


@dataclass(frozen=True)
class CaptionNoise:
    """Makes one attribute of some captions wrong. Example: `CaptionNoise(tokenizer)(tokens, generator)`.

    shares: by kind of attribute, the share of captions stating it that get it wrong; of several kinds one is drawn.
    """

    tokenizer: Any
    shares: Mapping[str, float] = field(default_factory=lambda: SHARES)

    def __call__(self, tokens: Tensor, generator: torch.Generator) -> Tensor:
        """tokens: [B, L] ids. Returns [B, L]."""
        rng = np.random.default_rng(int(torch.randint(2**31, (1,), generator=generator)))
        captions = [self.wrong(caption, rng) for caption in self.texts(tokens)]
        ids = self.tokenizer(captions, padding="max_length", truncation=True, return_tensors="pt")["input_ids"]
        return torch.as_tensor(ids)

    def texts(self, tokens: Tensor) -> list[str]:
        """The captions of `tokens` [B, L]."""
        # The tokenizer sets a space behind the opening quote.
        return [t.replace('" ', '"') for t in self.tokenizer.batch_decode(tokens, skip_special_tokens=True)]

    def wrong(self, caption: str, rng: np.random.Generator) -> str:
        """The caption with one attribute wrong, or itself."""
        kinds = [kind for kind in kinds_in(caption) if kind in self.shares]
        kind = kinds[rng.integers(len(kinds))] if kinds else None
        if kind is None or rng.uniform() >= self.shares[kind]:
            return caption
        others = (wrong_caption(caption, rng, kind) for _ in range(TRIES))
        return next(filter(is_trained, others), caption)


def is_trained(caption: str) -> bool:
    """Whether all that a caption names belongs to the training split."""
    shapes, colors, texts = (stated(caption, kind) for kind in ("shape", "color", "letter"))
    if len(shapes) == 2:
        return pair_split(*shapes) == "train"
    return all(text_split(text) == "train" for text in texts) and all(
        color_split(shape, color) == "train" for shape in shapes for color in colors
    )
