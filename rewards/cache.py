"""Scores remembered by content, for scorers that cost seconds or money.

The key is the picture, its prompt and its metadata, so equal rows share a score whatever their ids. Failures are not
remembered. It lives in memory, for one reward with fixed options: nothing else has to be in the key.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flowrl_img.rewards.protocol import RewardBatch, RewardOutput

__all__ = ["ScoreCache", "content_keys"]


@dataclass
class ScoreCache:
    """The `size` rows used last. Example: `ScoreCache(10_000)`; hits counts the rows that were not asked again."""

    size: int
    hits: int = 0
    _rows: OrderedDict[str, tuple[float, Mapping[str, Any]]] = field(default_factory=OrderedDict, repr=False)

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"a cache holds at least 1 score, got {self.size}")

    def find(self, key: str) -> tuple[float, Mapping[str, Any]] | None:
        """Value and details of a remembered row."""
        found = self._rows.get(key)
        if found is not None:
            self.hits += 1
            self._rows.move_to_end(key)
        return found

    def remember(self, keys: list[str], output: RewardOutput) -> None:
        """Keep the valid rows of `output`, one key each."""
        for row, key in enumerate(keys):
            if output.valid[row]:
                details = {name: column[row] for name, column in output.details.items()}
                self._rows[key] = (output.values[row].item(), details)
                self._rows.move_to_end(key)
        while len(self._rows) > self.size:
            self._rows.popitem(last=False)


def content_keys(batch: RewardBatch) -> list[str]:
    """SHA-256 of (size, pixels, prompt, metadata) of each row."""
    keys = []
    for image, prompt, row in zip(batch.images, batch.prompts, batch.metadata, strict=True):
        asked = json.dumps([list(image.shape), prompt, row], sort_keys=True, default=repr)
        keys.append(hashlib.sha256(asked.encode() + b"\0" + image.contiguous().numpy().tobytes()).hexdigest())
    return keys
