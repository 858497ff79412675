"""A CLIP model of transformers as two encoders, loaded at first use.

Embeddings are taken from the towers and their projections: `get_image_features` gives a tensor or an output object
depending on the version of transformers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl_img.rewards.neural import Truncation, frozen, pick_device, unit
from flowrl_img.rewards.pixels import CropPixels, crop_pixels
from flowrl_img.rewards.pretrained import (
    WEIGHTS,
    WeightsError,
    fingerprint,
    from_pretrained,
    locate,
    transformers_class,
)

__all__ = ["Clip"]

TOKENIZER = ("tokenizer_config.json",), ("tokenizer.json", "vocab.json")
PREPROCESSING = ("preprocessor_config.json", "processor_config.json")
TRAINED_WITH = {"openai/": "quick_gelu"}  # by who published the weights


@dataclass(frozen=True)
class Clip:
    """owner: the reward, for messages. model, processor: hub ids or folders. device: see `pick_device`.

    activation: what the weights were trained with, where known: a config that says otherwise is refused, because the
    model would run and score wrongly. None goes by the publisher of a hub id.
    """

    owner: str
    model: str
    processor: str
    revision: str | None = None
    device_name: str = "auto"
    activation: str | None = None

    @cached_property
    def device(self) -> torch.device:
        return pick_device(self.device_name)

    @cached_property
    def network(self) -> Any:
        """The CLIPModel: float32, in eval mode, frozen."""
        config, _ = self._files
        self._check_activation(json.loads(config.read_text()))
        what = f"{self.owner}.model = {self.model}"
        model_class = transformers_class(self.owner, "CLIPModel")
        return frozen(lambda: from_pretrained(model_class, config, what), self.device)

    @cached_property
    def pixels(self) -> CropPixels:
        [config] = locate(f"{self.owner}.processor", self.processor, [PREPROCESSING])
        return crop_pixels(config)

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of the processor; one that does not belong to the model is refused."""
        auto = transformers_class(self.owner, "AutoTokenizer")
        tokenizer = auto.from_pretrained(self._tokenizer_files[0].parent, local_files_only=True)
        if len(tokenizer) != self._text_config["vocab_size"]:
            raise WeightsError(
                f"{self.owner}.processor = {self.processor}: its tokenizer knows {len(tokenizer)} tokens, the model "
                f"{self._text_config['vocab_size']}; give the processor that the model was trained with"
            )
        return tokenizer

    @cached_property
    def truncation(self) -> Truncation:
        return Truncation(self.owner, self._text_config["max_position_embeddings"])

    @cached_property
    def fingerprint(self) -> dict[str, str]:
        """Revision and hash of weights and tokenizer, preprocessing and versions."""
        files = {"model": self._files[1], "tokenizer": self._tokenizer_files[1]}
        return fingerprint(files, model=self.model, processor=self.processor, preprocessing=repr(self.pixels))

    def count_truncated(self, prompts: Sequence[str]) -> list[bool]:
        """Which prompts are longer than the model reads."""
        ids = self.tokenizer(list(prompts), padding=False, truncation=False, verbose=False)["input_ids"]
        return self.truncation.count([len(row) for row in ids])

    def embed_pixels(self, pixels: Tensor) -> Tensor:
        """pixels: float32 [B, 3, size, size]. Unit rows [B, D]."""
        seen = self.network.vision_model(pixel_values=pixels).pooler_output
        return unit(self.network.visual_projection(seen))

    def embed_prompts(self, prompts: Sequence[str]) -> tuple[Tensor, list[bool]]:
        """Unit rows [B, D], and which prompts were cut."""
        cut = self.count_truncated(prompts)
        tokens = self.tokenizer(
            list(prompts), padding=True, truncation=True, max_length=self.truncation.limit, return_tensors="pt"
        ).to(self.device)
        read = self.network.text_model(input_ids=tokens.input_ids, attention_mask=tokens.attention_mask)
        return unit(self.network.text_projection(read.pooler_output)), cut

    @cached_property
    def _files(self) -> list[Path]:
        return locate(f"{self.owner}.model", self.model, [("config.json",), WEIGHTS], self.revision)

    @cached_property
    def _tokenizer_files(self) -> list[Path]:
        return locate(f"{self.owner}.processor", self.processor, TOKENIZER)

    @cached_property
    def _text_config(self) -> dict[str, Any]:
        [config] = locate(f"{self.owner}.model", self.model, [("config.json",)], self.revision)
        config_class = transformers_class(self.owner, "CLIPConfig")
        return config_class.from_pretrained(config.parent, local_files_only=True).text_config.to_dict()

    def _check_activation(self, config: dict[str, Any]) -> None:
        named = (act for start, act in TRAINED_WITH.items() if self.model.startswith(start))
        trained = self.activation or next(named, None)
        for tower in ("text_config", "vision_config"):
            runs = config.get(tower, {}).get("hidden_act", "quick_gelu")  # transformers' default where it is not said
            if trained is not None and runs != trained:
                raise WeightsError(
                    f"{self.owner}.model = {self.model}: its {tower} runs {runs}, the weights were trained with "
                    f"{trained}; scores would be wrong without a sign of it. Set hidden_act in its config.json"
                )
