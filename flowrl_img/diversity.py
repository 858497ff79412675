"""How different the pictures of one prompt are, from thumbnails that are small enough to keep for every picture.

The distance of two pictures is the root mean square difference of their 8 x 8 RGB thumbnails, in [0, 1]; the diversity
of a prompt is its mean over all pairs of the prompt's pictures. It sees layout and colour, not texture, needs no
network, and is 0 when all pictures of a prompt have become one.
"""

from __future__ import annotations

import base64
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

__all__ = ["diversity", "pack", "thumbnails", "unpack"]

SIDE = 8


def thumbnails(images: Tensor) -> NDArray[np.uint8]:
    """images: float [B, 3, H, W] in [0, 1], any size. Returns uint8 [B, 192]."""
    small = adaptive_avg_pool2d(images.float(), SIDE).flatten(1)
    return (small * 255).round().clamp(0, 255).byte().cpu().numpy()


def diversity(thumbs: NDArray[np.uint8], prompts: Sequence[Hashable]) -> dict[Hashable, float]:
    """Mean distance of the pairs inside each prompt. thumbs: [B, 192]; prompts: B. One picture makes no pair."""
    rows: Mapping[Hashable, list[int]] = defaultdict(list)
    for row, prompt in enumerate(prompts):
        rows[prompt].append(row)
    return {prompt: _mean_distance(thumbs[of]) for prompt, of in rows.items() if len(of) > 1}


def _mean_distance(thumbs: NDArray[np.uint8]) -> float:
    values = thumbs.astype(np.float64) / 255
    squares = ((values[:, None] - values[None]) ** 2).mean(-1)
    return float(np.sqrt(squares[np.triu_indices(len(values), 1)]).mean())


def pack(thumb: NDArray[np.uint8]) -> str:
    """One thumbnail as text."""
    return base64.b64encode(thumb.tobytes()).decode()


def unpack(text: str) -> NDArray[np.uint8]:
    """The thumbnail in a text. ValueError for anything else."""
    thumb = np.frombuffer(base64.b64decode(text, validate=True), np.uint8)
    if len(thumb) != 3 * SIDE * SIDE:
        raise ValueError(f"a thumbnail has {3 * SIDE * SIDE} bytes, not {len(thumb)}")
    return thumb
