"""The colour of an object by CLIP: GenEval's classifier.

The object on grey, cropped to its box, against the mean text of three templates for each of ten colours. Source: arXiv
2310.11513 (GenEval), there with open_clip's ViT-L/14 of OpenAI, which are the same weights as transformers' model; they
need QuickGELU, so a config without it is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from flowrl_img.rewards.clip_model import Clip
from flowrl_img.rewards.geneval.detection import Detection, Picture
from flowrl_img.rewards.neural import scoring, unit
from flowrl_img.rewards.pretrained import WeightsError

__all__ = ["COLORS", "TEMPLATES", "ClipColors", "cut_out"]

COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
TEMPLATES = ("a photo of a {color} {label}", "a photo of a {color}-colored {label}", "a photo of a {color} object")
GREY = (0x99, 0x99, 0x99)


@dataclass(frozen=True)
class ClipColors:
    """model, processor: hub ids or folders of OpenAI's CLIP ViT-L/14. revision: of the model."""

    model: str = "openai/clip-vit-large-patch14"
    processor: str = "openai/clip-vit-large-patch14"
    revision: str | None = None
    device: str = "auto"

    name: ClassVar[str] = "clip_colors"
    colors: ClassVar[Sequence[str]] = COLORS

    @cached_property
    def _clip(self) -> Clip:
        return Clip(self.name, self.model, self.processor, self.revision, self.device, activation="quick_gelu")

    @cached_property
    def _texts(self) -> dict[str, Tensor]:
        """Unit rows [10, D] of each class that was asked for."""
        return {}

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Revision and hash of the weights, preprocessing and versions."""
        return self._clip.fingerprint

    def classify(self, image: Picture, detections: Sequence[Detection], label: str) -> list[str]:
        """image: uint8 [H, W, 3] RGB. One colour name for each detection, all of class `label`."""
        if not detections:
            return []
        with scoring(self._clip.device):
            crops = [torch.from_numpy(np.array(cut_out(image, found)))[None] for found in detections]
            pixels = torch.cat([self._clip.pixels.pictures(crop) for crop in crops])
            seen = self._clip.embed_pixels(pixels.to(self._clip.device)) @ self._text(label).T
            if not seen.isfinite().all():  # the first colour would be the largest of ten NaN
                raise WeightsError(
                    f"clip_colors.model = {self.model} gives an embedding that is zero or not finite: "
                    "its weights are broken"
                )
            return [COLORS[k] for k in seen.argmax(1).tolist()]

    def _text(self, label: str) -> Tensor:
        if label not in self._texts:
            prompts = [form.format(color=color, label=label) for color in COLORS for form in TEMPLATES]
            rows, _ = self._clip.embed_prompts(prompts)
            self._texts[label] = unit(rows.view(len(COLORS), len(TEMPLATES), -1).mean(1))
        return self._texts[label]


def cut_out(image: Picture, found: Detection) -> Image.Image:
    """The object on grey where it has a mask, cropped to its box (rounded, at least a pixel)."""
    picture = Image.fromarray(image)
    if found.mask is not None:
        picture = Image.composite(picture, Image.new("RGB", picture.size, GREY), Image.fromarray(found.mask))
    x0, y0, x1, y1 = (round(side) for side in found.box)
    return picture.crop((x0, y0, max(x1, x0 + 1), max(y1, y0 + 1)))
