"""HPSv3: a Qwen2-VL-7B with a preference head. The score is the mean of its two outputs, unbounded, usually 5 to 12.

It runs the published package, which wants transformers 4.45 and trl, so serve it from an environment of its own:
`flowrl-img rewards env hpsv3 envs/hpsv3`, then `rewards: [{name: remote, reward: hpsv3, url: ...}]`. About 16 GB of
weights. Source: arXiv 2508.03789.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from PIL import Image

from flowrl_img.rewards.known_answers import KnownAnswer
from flowrl_img.rewards.neural import frozen, pick_device
from flowrl_img.rewards.pretrained import WeightsError, fingerprint, library, locate_file
from flowrl_img.rewards.protocol import Metadata, RewardBatch, RewardOutput
from flowrl_img.rewards.scene_answers import matched_scenes

__all__ = ["HPSv3"]


@dataclass(frozen=True)
class HPSv3:
    """mu of the preference head. checkpoint: a file, or owner/name/file on the hub. config: of the package, whose own
    one names its base model; empty: the package's. device: "auto" or torch's name. Details: `sigma`.
    """  # fmt: skip

    checkpoint: str = "MizzenAI/HPSv3/HPSv3.safetensors"
    config: str = ""
    device: str = "auto"

    name: ClassVar[str] = "hpsv3"
    needs: ClassVar[frozenset[str]] = frozenset()
    requirements: ClassVar[tuple[str, ...]] = ("hpsv3==1.0.0",)

    @cached_property
    def fingerprint(self) -> dict[str, str]:
        """Hash and revision of the weights, versions."""
        return fingerprint({"model": locate_file("hpsv3.checkpoint", self.checkpoint)}, config=self.config or "package")

    @cached_property
    def _scorer(self) -> Any:
        """The package's inferencer, its network frozen and in eval mode."""
        fix = "`flowrl-img rewards env hpsv3 envs/hpsv3` makes an environment to serve it from, for the reward `remote`"
        package = library(self.name, "hpsv3", fix)
        device = str(pick_device(self.device))
        path = str(locate_file("hpsv3.checkpoint", self.checkpoint))
        made = package.HPSv3RewardInferencer(config_path=self.config or None, checkpoint_path=path, device=device)
        named = inspect.signature(made.reward).parameters
        if not {"prompts", "image_paths"} <= named.keys():
            raise WeightsError(
                f"hpsv3: this version of the package takes {', '.join(named)}; hpsv3 1.0.0 is known to work"
            )
        if not getattr(made, "use_special_tokens", True):
            raise WeightsError(
                "hpsv3: use_special_tokens is off in its config, and the package then drops the question"
            )
        frozen(lambda: made.model, torch.device(device))
        return made

    def validate(self, prompts: Sequence[str], metadata: Sequence[Metadata]) -> None:
        """Any prompt will do. WeightsError when the package is missing."""
        _ = self._scorer

    def known_answers(self) -> Sequence[KnownAnswer]:
        """A red circle and a blue square fit their own prompts better than each other's."""
        return [matched_scenes()]

    def __call__(self, batch: RewardBatch) -> RewardOutput:
        """values: float32 [B]."""
        pictures = [Image.fromarray(image.numpy()) for image in batch.images]
        with torch.no_grad():  # named arguments: their order changed between releases
            found = self._scorer.reward(prompts=list(batch.prompts), image_paths=pictures)
        if found.shape != (len(batch), 2):
            raise ValueError(f"hpsv3: the package gave {list(found.shape)} instead of [{len(batch)}, 2]")
        mu, sigma = found.float().cpu().unbind(1)
        return RewardOutput.of(mu.tolist(), {"sigma": sigma.tolist()})
