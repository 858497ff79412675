"""DeQA: how good a picture looks, without its prompt, by a vision-language model taught with ratings of quality.

Its code comes with its weights and wants an old transformers, so serve it from an environment of its own:
`flowrl-img rewards env deqa envs/deqa`, then `rewards: [{name: remote, reward: deqa, url: ...}]`.
Source: arXiv 2501.11561.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image

from flowrl_img.rewards.known_answers import KnownAnswer, Scores
from flowrl_img.rewards.neural import frozen, pick_device
from flowrl_img.rewards.pretrained import WeightsError
from flowrl_img.rewards.protocol import Metadata, RewardBatch, RewardOutput
from flowrl_img.rewards.scene_answers import circle

__all__ = ["DeQA"]

BEST = 5.0


@dataclass(frozen=True)
class DeQA:
    """rating / 5 in [0.2, 1]. model: hub id or folder. revision: commit of the hub id, whose code is run.

    trust_remote_code: must be set, with a revision that you have read: the model runs code from its repository.
    """

    model: str = "zhiyuanyou/DeQA-Score-Mix3"
    revision: str | None = None
    trust_remote_code: bool = False
    device: str = "auto"

    name: ClassVar[str] = "deqa"
    needs: ClassVar[frozenset[str]] = frozenset()
    requirements: ClassVar[tuple[str, ...]] = (
        "transformers==4.36.1", "accelerate==0.21.0", "sentencepiece", "protobuf", "einops", "numpy<2", "icecream",
        "requests",
    )  # fmt: skip

    @property
    def fingerprint(self) -> dict[str, str]:
        """Where model and code come from, and the library that runs them."""
        library = f"transformers {metadata.version('transformers')}"
        return {"model": self.model, "revision": self.revision or "not pinned", "libraries": library}

    @cached_property
    def _network(self) -> Any:
        if not self.trust_remote_code:
            raise WeightsError(
                f"deqa: {self.model} runs code from its own repository. Read it at a commit, then set revision to that "
                "commit and trust_remote_code=true, best on a server of its own (see `flowrl-img rewards env`)"
            )
        if not Path(self.model).is_dir() and self.revision is None:
            raise WeightsError(f"deqa: set revision to the commit of {self.model} that you read: its code may change")
        try:
            from transformers import AutoModelForCausalLM

            load = AutoModelForCausalLM.from_pretrained
            options = {"revision": self.revision, "trust_remote_code": True, "torch_dtype": torch.float16}
            made = frozen(lambda: load(self.model, **options), pick_device(self.device))
        except (ImportError, AttributeError, OSError, RuntimeError) as error:
            raise WeightsError(
                f"deqa: {self.model} cannot be loaded ({error}); it is made for transformers 4.36: "
                "`flowrl-img rewards env deqa envs/deqa` makes an environment to serve it from, for the reward `remote`"
            ) from error
        if not callable(getattr(made, "score", None)):
            raise WeightsError(f"deqa: {self.model} has no method `score`; give a DeQA-Score model")
        return made

    def validate(self, prompts: Sequence[str], metadata: Sequence[Metadata]) -> None:
        """Prompts are not read. WeightsError when the model cannot be loaded."""
        _ = self._network

    def known_answers(self) -> Sequence[KnownAnswer]:
        """Ratings lie between bad and excellent, and differ between a drawing and noise."""
        noise = np.random.default_rng(0).integers(0, 256, circle().image.shape, np.uint8)
        examples = circle(), replace(circle(), what="noise", image=noise)
        return [Scores(example, low=1 / BEST, high=1.0) for example in examples]

    def __call__(self, batch: RewardBatch) -> RewardOutput:
        """values: float32 [B]."""
        pictures = [Image.fromarray(image.numpy()) for image in batch.images]
        with torch.no_grad():
            ratings = torch.as_tensor(self._network.score(pictures, task_="quality", input_="image")).float().cpu()
        if ratings.shape != (len(batch),):
            raise ValueError(f"deqa: the model gave {list(ratings.shape)} ratings for {len(batch)} pictures")
        return RewardOutput.of((ratings / BEST).tolist())
