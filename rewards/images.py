"""The one conversion from what a decoder gives to what a scorer sees.

Rounding happens in float32 (in bf16 a fifth of all pixels would move by one level) and by rounding, not truncation
(which darkens half of all pixels by one level).
"""

from __future__ import annotations

from pathlib import Path
from typing import IO

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor

__all__ = ["RANGE_SLACK", "read_picture", "to_uint8"]

RANGE_SLACK = 1e-3  # below half an 8-bit level (1 / 510): more than that is another range, not rounding


def to_uint8(images: Tensor) -> tuple[Tensor, Tensor]:
    """images: float [B, 3, H, W] in [0, 1]. Returns uint8 [B, H, W, 3] on the CPU, and bool [B]: the row is finite.

    A row with a NaN or infinity comes back black and False, so that the caller can mark it invalid.
    ValueError when the shape, dtype or range is wrong (for example pictures in [-1, 1]).
    """
    if images.ndim != 4 or images.shape[1] != 3 or not images.is_floating_point():
        raise ValueError(f"images must be float [B, 3, H, W], got {images.dtype} {list(images.shape)}")
    images = images.detach().to("cpu", torch.float32)
    finite = images.isfinite().flatten(1).all(dim=1)
    images = torch.where(finite[:, None, None, None], images, 0.0)
    if images.numel():
        low, high = images.min().item(), images.max().item()
        if low < -RANGE_SLACK or high > 1 + RANGE_SLACK:
            raise ValueError(
                f"images must lie in [0, 1], got [{low:.4g}, {high:.4g}]; map [-1, 1] by (x + 1) / 2 and clamp"
            )
    pixels = (images * 255).round().clamp(0, 255).to(torch.uint8)
    return pixels.permute(0, 2, 3, 1).contiguous(), finite


def read_picture(file: Path | IO[bytes]) -> NDArray[np.uint8]:
    """uint8 [H, W, 3] RGB, upright as its EXIF data say. OSError for what is no picture."""
    with Image.open(file) as picture:
        return np.asarray(ImageOps.exif_transpose(picture).convert("RGB"))
