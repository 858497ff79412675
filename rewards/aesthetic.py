"""LAION's aesthetic predictor: a linear head on OpenAI's CLIP ViT-L/14, taught by ratings from 1 to 10.

The head has no activations, so the score is one affine map of the picture's direction: easily raised by style alone,
blind to the prompt. Values usually lie in 4.5 to 6.5. Source: the improved-aesthetic-predictor repository,
`sac+logos+ava1-l14-linearMSE.pth`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from torch import Tensor

from flowrl_img.rewards.clip_model import Clip
from flowrl_img.rewards.known_answers import KnownAnswer, Scores
from flowrl_img.rewards.neural import ScoreHead, frozen, full_precision, output_of, scoring
from flowrl_img.rewards.pretrained import WeightsError, fingerprint, load_strict, locate_file, read
from flowrl_img.rewards.protocol import Metadata, RewardBatch, RewardOutput
from flowrl_img.rewards.scene_answers import circle, square

__all__ = ["WIDTH", "Aesthetic", "load_head"]

WIDTH = 768  # of the embedding of ViT-L/14


@dataclass(frozen=True)
class Aesthetic:
    """w . picture + b on the unit embedding. model, processor: hub ids or folders of OpenAI's CLIP ViT-L/14.

    head: a file, or owner/name/file on the hub. revision: of the model. device: "auto" or torch's name.
    """

    model: str = "openai/clip-vit-large-patch14"
    processor: str = "openai/clip-vit-large-patch14"
    head: str = "trl-lib/ddpo-aesthetic-predictor/aesthetic-model.pth"
    revision: str | None = None
    device: str = "auto"

    name: ClassVar[str] = "aesthetic"
    needs: ClassVar[frozenset[str]] = frozenset()
    requirements: ClassVar[tuple[str, ...]] = ("transformers>=4.57", "safetensors>=0.5")

    @cached_property
    def _clip(self) -> Clip:
        return Clip(self.name, self.model, self.processor, self.revision, self.device, activation="quick_gelu")

    @cached_property
    def _head_file(self) -> Path:
        return locate_file("aesthetic.head", self.head)

    @cached_property
    def _head(self) -> ScoreHead:
        return frozen(lambda: load_head(self._head_file), self._clip.device)

    @cached_property
    def fingerprint(self) -> dict[str, str]:
        """Revision and hash of the weights and the head, preprocessing and versions."""
        return {**self._clip.fingerprint, **fingerprint({"head": self._head_file}, head=self.head)}

    def validate(self, prompts: Sequence[str], metadata: Sequence[Metadata]) -> None:
        """Any prompt will do: it is not read."""

    def known_answers(self) -> Sequence[KnownAnswer]:
        """Two unlike pictures score within the ratings that the head was taught."""
        return [Scores(circle(), low=0.0, high=11.0), Scores(square(), low=0.0, high=11.0)]

    def __call__(self, batch: RewardBatch) -> RewardOutput:
        """values: float32 [B]."""
        with scoring(self._clip.device):
            return output_of(self._score(self._clip.pixels.pictures(batch.images)))

    def differentiable(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """images: float [B, 3, H, W] in [0, 1]. The scores float32 [B], with gradients to the images."""
        with full_precision(self._clip.device):
            return self._score(self._clip.pixels.floats(images))

    def _score(self, pixels: Tensor) -> Tensor:
        return self._head(self._clip.embed_pixels(pixels.to(self._clip.device)))


def load_head(path: Path) -> ScoreHead:
    """The published linear head. WeightsError for another, such as one with ReLU, whose layers have other numbers."""
    head = ScoreHead(WIDTH)
    try:
        load_strict(head, read(path), f"aesthetic.head = {path}")
    except WeightsError as error:
        raise WeightsError(f"{error}. The head must have 5 linear layers, 768 inputs and no activations") from error
    return head
