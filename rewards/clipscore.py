"""CLIPScore: the cosine between a picture and its prompt, in the three forms that are reported under this name.

Sources: arXiv 2104.08718 for `hessel`, there with ViT-B/32 and a prefix; the library of that name for `torchmetrics`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from torch import Tensor

from flowrl_img.rewards.clip_model import Clip
from flowrl_img.rewards.known_answers import KnownAnswer
from flowrl_img.rewards.pairs import cosine, differentiable_pairs, score_pairs
from flowrl_img.rewards.protocol import Metadata, RewardBatch, RewardOutput
from flowrl_img.rewards.scene_answers import matched_scenes

__all__ = ["VARIANTS", "ClipScore", "Variant"]


@dataclass(frozen=True)
class Variant:
    """scale * max(cos, floor) of a picture and `prefix` + prompt."""

    scale: float
    prefix: str
    floor: float


VARIANTS: Mapping[str, Variant] = {
    "cos": Variant(1.0, "", -1.0),
    "hessel": Variant(2.5, "A photo depicts ", 0.0),
    "torchmetrics": Variant(100.0, "", 0.0),
}


@dataclass(frozen=True)
class ClipScore:
    """variant: "cos", "hessel" (2.5 max(cos, 0), with a prefix) or "torchmetrics" (100 max(cos, 0)).

    scale, prefix: in place of the variant's own. model, processor: hub ids or folders of a CLIP model; the paper of
    `hessel` used openai/clip-vit-base-patch32. activation: "quick_gelu" or "gelu", what the weights were trained with;
    for a copy of OpenAI's weights in a folder say "quick_gelu", so that a wrong config is refused.
    Details: `truncated`.
    """

    variant: str = "cos"
    model: str = "openai/clip-vit-large-patch14"
    processor: str = "openai/clip-vit-large-patch14"
    revision: str | None = None
    device: str = "auto"
    scale: float | None = None
    prefix: str | None = None
    activation: str | None = None

    name: ClassVar[str] = "clipscore"
    needs: ClassVar[frozenset[str]] = frozenset()
    requirements: ClassVar[tuple[str, ...]] = ("transformers>=4.57", "safetensors>=0.5")

    def __post_init__(self) -> None:
        if self.variant not in VARIANTS:
            raise ValueError(f"clipscore variant must be one of {sorted(VARIANTS)}, got {self.variant!r}")

    @cached_property
    def _clip(self) -> Clip:
        return Clip(self.name, self.model, self.processor, self.revision, self.device, self.activation)

    @property
    def fingerprint(self) -> dict[str, str]:
        """Revision and hash of the weights, preprocessing and versions."""
        return self._clip.fingerprint

    def validate(self, prompts: Sequence[str], metadata: Sequence[Metadata]) -> None:
        """Any prompt will do; warns of those longer than the model reads. WeightsError when there is no tokenizer."""
        self._clip.count_truncated(self._texts(prompts))

    def known_answers(self) -> Sequence[KnownAnswer]:
        """A red circle and a blue square fit their own prompts better than each other's."""
        return [matched_scenes()]

    def __call__(self, batch: RewardBatch) -> RewardOutput:
        """values: float32 [B]."""
        texts = self._texts(batch.prompts)
        asked = RewardBatch(batch.images, texts, batch.metadata, batch.ids, batch.group_ids)
        return score_pairs(self._clip, asked, self._formula)

    def differentiable(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """images: float [B, 3, H, W] in [0, 1]. The scores float32 [B], with gradients to the images."""
        return differentiable_pairs(self._clip, images, self._texts(prompts), self._formula)

    def _texts(self, prompts: Sequence[str]) -> list[str]:
        prefix = VARIANTS[self.variant].prefix if self.prefix is None else self.prefix
        return [prefix + prompt for prompt in prompts]

    def _formula(self, pictures: Tensor, prompts: Tensor) -> Tensor:
        usual = VARIANTS[self.variant]
        scale = usual.scale if self.scale is None else self.scale
        return scale * cosine(pictures, prompts).clamp(min=usual.floor)
