"""Captions that are wrong now and then, as those of the web are, for the last stage of pre-training.

A model that learns from them draws the wrong thing at times although it could draw the right one, as large models do:
counts off by one, left for right, two colours on the wrong objects, misspelt signs. That is what rewards can improve.
A wrong caption never names a combination that is held out: shapes stay, and so do the colours of single objects.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowrl_img.world.vocabulary import CHARACTERS, COLORS

__all__ = ["CaptionNoise"]

CONFUSED = {
    "two": "three", "three": "two", "four": "three",
    "left": "right", "right": "left", "above": "below", "below": "above",
}  # fmt: skip


@dataclass(frozen=True)
class CaptionNoise:
    """Shares of captions that get one mistake. Example: `CaptionNoise(tokenizer)(tokens, generator)`."""

    tokenizer: Any
    scenes: float = 0.45
    """of captions with a count, a relation or two colours"""
    signs: float = 0.6
    """of captions of signs, where one character becomes a random one"""

    def __call__(self, tokens: Tensor, generator: torch.Generator) -> Tensor:
        """tokens: [B, L] ids. Returns [B, L]."""
        chance = torch.rand(len(tokens), 1, generator=generator)
        sign = torch.isin(tokens, self._ids(list(CHARACTERS))).any(1, keepdim=True)
        wrong = torch.where(sign, self._misspelt(tokens, generator), self._exchanged(self._confused(tokens)))
        return torch.where(chance < torch.where(sign, self.signs, self.scenes), wrong, tokens)

    def _ids(self, words: list[str]) -> Tensor:
        return torch.tensor(self.tokenizer.convert_tokens_to_ids(words))

    def _misspelt(self, tokens: Tensor, generator: torch.Generator) -> Tensor:
        characters = self._ids(list(CHARACTERS))
        spells = torch.isin(tokens, characters)
        place = (spells * torch.rand(tokens.shape, generator=generator)).argmax(1, keepdim=True)
        other = characters[torch.randint(len(characters), (len(tokens), 1), generator=generator)]
        return torch.where(spells.any(1, keepdim=True), tokens.scatter(1, place, other), tokens)

    def _confused(self, tokens: Tensor) -> Tensor:
        """The number or relation replaced by its neighbour."""
        table = torch.arange(len(self.tokenizer))
        names = [[f"{word}</w>" for word in side] for side in (CONFUSED, CONFUSED.values())]
        table[self._ids(names[0])] = self._ids(names[1])
        return table[tokens]

    def _exchanged(self, tokens: Tensor) -> Tensor:
        """Two colours exchanged, each with its article."""
        colors = torch.isin(tokens, self._ids([f"{color}</w>" for color in COLORS]))
        out = tokens.clone()
        for row in (colors.sum(1) == 2).nonzero().flatten().tolist():
            first, second = colors[row].nonzero().flatten().tolist()
            ours, theirs = [first - 1, first], [second - 1, second]
            out[row, ours], out[row, theirs] = tokens[row, theirs], tokens[row, ours]
        return out
