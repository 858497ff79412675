"""PickScore: a CLIP model fine-tuned on which of two pictures people picked for a prompt.

Source: arXiv 2305.01569; the factor 1/26 is that of Flow-GRPO's code. It is no bound: values lie near 0.65 to 0.95, and
within a group they differ by 0.01 to 0.04 only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from torch import Tensor

from flowrl_img.rewards.clip_model import Clip
from flowrl_img.rewards.known_answers import KnownAnswer
from flowrl_img.rewards.pairs import cosine, differentiable_pairs, score_pairs
from flowrl_img.rewards.protocol import Metadata, RewardBatch, RewardOutput
from flowrl_img.rewards.scene_answers import matched_scenes

__all__ = ["PickScore"]


@dataclass(frozen=True)
class PickScore:
    """scale * exp(logit_scale) * cos(picture, prompt). model, processor: hub ids or folders of a CLIP model.

    revision: commit or branch of the hub id. device: "auto" or torch's name. scale: 1 gives the raw score, whose
    softmax over two pictures is the probability that the one is picked. Details: `truncated`.
    """

    model: str = "yuvalkirstain/PickScore_v1"
    processor: str = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
    revision: str | None = None
    device: str = "auto"
    scale: float = 1 / 26

    name: ClassVar[str] = "pickscore"
    needs: ClassVar[frozenset[str]] = frozenset()
    requirements: ClassVar[tuple[str, ...]] = ("transformers>=4.57", "safetensors>=0.5")

    @cached_property
    def _clip(self) -> Clip:
        return Clip(self.name, self.model, self.processor, self.revision, self.device)

    @property
    def fingerprint(self) -> dict[str, str]:
        """Revision and hash of the weights, preprocessing and versions."""
        return self._clip.fingerprint

    def validate(self, prompts: Sequence[str], metadata: Sequence[Metadata]) -> None:
        """Any prompt will do; warns of those longer than the model reads. WeightsError when there is no tokenizer."""
        self._clip.count_truncated(prompts)

    def known_answers(self) -> Sequence[KnownAnswer]:
        """A red circle and a blue square fit their own prompts better than each other's."""
        return [matched_scenes()]

    def __call__(self, batch: RewardBatch) -> RewardOutput:
        """values: float32 [B]."""
        return score_pairs(self._clip, batch, self._formula)

    def differentiable(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """images: float [B, 3, H, W] in [0, 1]. The scores float32 [B], with gradients to the images."""
        return differentiable_pairs(self._clip, images, prompts, self._formula)

    def _formula(self, pictures: Tensor, prompts: Tensor) -> Tensor:
        return self._clip.network.logit_scale.exp() * cosine(pictures, prompts) * self.scale
