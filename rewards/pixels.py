"""From pictures to what an image encoder reads, in the two ways of the published scorers.

Each has two entries: `pictures` from 8-bit pictures, the one that scores, and `floats` from pictures in [0, 1], through
which gradients flow.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from flowrl_img.rewards.pretrained import WeightsError

__all__ = ["CLIP_MEAN", "CLIP_STD", "CropPixels", "PadPixels", "Pixels", "crop_pixels"]

RGB = tuple[float, float, float]
CLIP_MEAN: RGB = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD: RGB = (0.26862954, 0.26130258, 0.27577711)


class Pixels(Protocol):
    """A preprocessing. Its `repr` is recorded beside the scores."""

    def pictures(self, images: Tensor) -> Tensor:
        """images: uint8 [B, H, W, 3]. float32 [B, 3, size, size], normalised."""
        ...

    def floats(self, images: Tensor) -> Tensor:
        """images: float [B, 3, H, W] in [0, 1]. As `pictures`, differentiable."""
        ...


@dataclass(frozen=True)
class CropPixels:
    """The short side to `size`, the central `crop` x `crop`, then (x - mean) / std.

    `pictures` resizes by Pillow's bicubic on 8-bit values, as the published processors do; `floats` by torch's
    antialiased bicubic, the same filter without rounding and clipping between its two passes. rounded: the first row
    of an odd margin is rounded half to even (torchvision) instead of down (transformers).
    """

    size: int = 224
    crop: int = 224
    mean: RGB = CLIP_MEAN
    std: RGB = CLIP_STD
    rounded: bool = False

    def __post_init__(self) -> None:
        if self.crop > self.size:
            raise ValueError(f"a crop of {self.crop} does not fit into pictures of {self.size}")

    def pictures(self, images: Tensor) -> Tensor:
        """images: uint8 [B, H, W, 3]. float32 [B, 3, crop, crop]."""
        height, width = self._resized(*images.shape[1:3])
        drawn = [Image.fromarray(image.numpy()) for image in images]
        small = [np.asarray(picture.resize((width, height), Image.Resampling.BICUBIC)) for picture in drawn]
        pixels = torch.from_numpy(np.stack(small)).permute(0, 3, 1, 2).contiguous().float() / 255
        return _normalised(self._cropped(pixels), self.mean, self.std)

    def floats(self, images: Tensor) -> Tensor:
        """images: float [B, 3, H, W] in [0, 1]. float32 [B, 3, crop, crop]."""
        resized = _resize(images.float(), self._resized(*images.shape[2:]), antialias=True).clamp(0, 1)
        return _normalised(self._cropped(resized), self.mean, self.std)

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        short = min(height, width)
        return int(self.size * height / short), int(self.size * width / short)

    def _cropped(self, pixels: Tensor) -> Tensor:
        top, left = (self._start(side - self.crop) for side in pixels.shape[2:])
        return pixels[:, :, top : top + self.crop, left : left + self.crop]

    def _start(self, margin: int) -> int:
        return round(margin / 2) if self.rounded else margin // 2


@dataclass(frozen=True)
class PadPixels:
    """The long side to `size` (bicubic on float values), black to a square, and only then (x - mean) / std.

    antialias: torchvision resized tensors without it before 0.17, so published numbers may be of either kind.
    """

    size: int = 224
    antialias: bool = True
    mean: RGB = CLIP_MEAN
    std: RGB = CLIP_STD

    def pictures(self, images: Tensor) -> Tensor:
        """images: uint8 [B, H, W, 3]. float32 [B, 3, size, size]."""
        return self.floats(images.permute(0, 3, 1, 2).contiguous().float() / 255)

    def floats(self, images: Tensor) -> Tensor:
        """images: float [B, 3, H, W] in [0, 1]. float32 [B, 3, size, size]."""
        scale = self.size / max(images.shape[2:])
        height, width = (round(side * scale) for side in images.shape[2:])
        resized = _resize(images.float(), (height, width), self.antialias)
        down, right = self.size - height, self.size - width
        square = F.pad(resized, (right // 2, right - right // 2, down // 2, down - down // 2))
        return _normalised(square, self.mean, self.std)


def crop_pixels(config_file: Path) -> CropPixels:
    """What a CLIP model's preprocessor_config.json or processor_config.json says. WeightsError when it is no CLIP's."""
    stored = json.loads(config_file.read_text())
    config: Mapping[str, Any] = stored.get("image_processor", stored)
    steps = ("do_resize", "do_center_crop", "do_rescale", "do_normalize")
    off = [step for step in steps if not config.get(step, True)]
    size, crop = _side(config.get("size", 224), "shortest_edge"), _side(config.get("crop_size", 224), "height")
    if off or config.get("resample", 3) != 3 or size is None or crop is None:
        raise WeightsError(f"{config_file} is no CLIP preprocessing (short side, bicubic, centre crop, normalise)")
    mean, std = (tuple(config.get(key, usual)) for key, usual in (("image_mean", CLIP_MEAN), ("image_std", CLIP_STD)))
    return CropPixels(size, crop, mean, std)


def _side(stored: int | Mapping[str, int], key: str) -> int | None:
    """A length, stored as such or under `key`; None for another shape."""
    return stored if isinstance(stored, int) else stored.get(key)


def _resize(images: Tensor, size: tuple[int, int], antialias: bool) -> Tensor:
    if images.shape[2:] == size:
        return images
    return F.interpolate(images, size=size, mode="bicubic", antialias=antialias)


def _normalised(pixels: Tensor, mean: RGB, std: RGB) -> Tensor:
    centre, spread = (torch.tensor(numbers, device=pixels.device)[:, None, None] for numbers in (mean, std))
    return (pixels - centre) / spread
