"""ImageReward: BLIP with a score, fine-tuned on rankings of pictures by people.

Values have mean 0 and spread 1 over the pictures it was made for; negative ones are usual. Only 35 tokens of a prompt
are read. Source: arXiv 2304.05977; checkpoint ImageReward-v1.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from flowrl_img.rewards.blip import BlipReward, BlipSizes, build_blip, renamed
from flowrl_img.rewards.known_answers import KnownAnswer
from flowrl_img.rewards.neural import Truncation, frozen, full_precision, output_of, pick_device, scoring
from flowrl_img.rewards.pixels import CropPixels
from flowrl_img.rewards.pretrained import (
    WeightsError,
    fingerprint,
    load_strict,
    locate,
    locate_file,
    read,
    transformers_class,
)
from flowrl_img.rewards.protocol import Metadata, RewardBatch, RewardOutput
from flowrl_img.rewards.scene_answers import matched_scenes

__all__ = ["TOKENS", "ImageReward"]

TOKENS = 35  # with start and end


@dataclass(frozen=True)
class ImageReward:
    """weights: a file, or owner/name/file on the hub. tokenizer: hub id or folder of BERT's uncased tokenizer.

    revision: of the weights. device: "auto" or torch's name. sizes: of the network, for other checkpoints than the
    published one. Details: `truncated`.
    """

    weights: str = "THUDM/ImageReward/ImageReward.pt"
    tokenizer: str = "google-bert/bert-base-uncased"
    revision: str | None = None
    device: str = "auto"
    sizes: BlipSizes = field(default_factory=BlipSizes)

    name: ClassVar[str] = "imagereward"
    needs: ClassVar[frozenset[str]] = frozenset()
    requirements: ClassVar[tuple[str, ...]] = ("transformers>=4.57", "safetensors>=0.5")

    @cached_property
    def _device(self) -> torch.device:
        return pick_device(self.device)

    @cached_property
    def _file(self) -> Path:
        return locate_file("imagereward.weights", self.weights, self.revision)

    @cached_property
    def _tokenizer_files(self) -> list[Path]:
        return locate("imagereward.tokenizer", self.tokenizer, [("tokenizer_config.json",), ("tokenizer.json",)])

    @cached_property
    def _pixels(self) -> CropPixels:
        return CropPixels(self.sizes.image, self.sizes.image, rounded=True)

    @cached_property
    def _network(self) -> BlipReward:
        return frozen(self._load, self._device)

    def _load(self) -> BlipReward:
        network = build_blip(self.sizes)
        load_strict(network, renamed(read(self._file)), f"imagereward.weights = {self._file}")
        return network

    @cached_property
    def _tokenizer(self) -> Any:
        """BERT's, with the two tokens that BLIP adds."""
        auto = transformers_class(self.name, "AutoTokenizer")
        tokenizer = auto.from_pretrained(self._tokenizer_files[0].parent, local_files_only=True)
        tokenizer.add_special_tokens({"bos_token": "[DEC]"})
        tokenizer.add_tokens(["[ENC]"], special_tokens=True)
        if len(tokenizer) != self.sizes.vocabulary:
            raise WeightsError(
                f"imagereward.tokenizer = {self.tokenizer}: {len(tokenizer)} tokens with BLIP's two, the model has "
                f"{self.sizes.vocabulary}; give BERT's uncased tokenizer"
            )
        return tokenizer

    @cached_property
    def _truncation(self) -> Truncation:
        return Truncation(self.name, TOKENS)

    @cached_property
    def fingerprint(self) -> dict[str, str]:
        """Revision and hash of weights and tokenizer, preprocessing and versions."""
        files = {"model": self._file, "tokenizer": self._tokenizer_files[1]}
        facts = {"model": self.weights, "processor": self.tokenizer, "preprocessing": repr(self._pixels)}
        return fingerprint(files, **facts)

    def validate(self, prompts: Sequence[str], metadata: Sequence[Metadata]) -> None:
        """Any prompt will do; warns of those longer than the model reads. WeightsError when there is no tokenizer."""
        self._count_truncated(prompts)

    def known_answers(self) -> Sequence[KnownAnswer]:
        """A red circle and a blue square fit their own prompts better than each other's."""
        return [matched_scenes()]

    def __call__(self, batch: RewardBatch) -> RewardOutput:
        """values: float32 [B]."""
        cut = self._count_truncated(batch.prompts)
        with scoring(self._device):
            return output_of(self._score(self._pixels.pictures(batch.images), batch.prompts), cut)

    def differentiable(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """images: float [B, 3, H, W] in [0, 1]. The scores float32 [B], with gradients to the images."""
        with full_precision(self._device):
            return self._score(self._pixels.floats(images), prompts)

    def _score(self, pixels: Tensor, prompts: Sequence[str]) -> Tensor:
        tokens = self._tokenizer(
            list(prompts), padding="max_length", truncation=True, max_length=TOKENS, return_tensors="pt"
        ).to(self._device)
        return self._network(pixels.to(self._device), tokens.input_ids, tokens.attention_mask)

    def _count_truncated(self, prompts: Sequence[str]) -> list[bool]:
        ids = self._tokenizer(list(prompts), padding=False, truncation=False, verbose=False)["input_ids"]
        return self._truncation.count([len(row) for row in ids])
