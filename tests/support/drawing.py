"""Pictures of a trainer's model and prompts, drawn as evaluation draws them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from flowrl_img.blend import Blend, Side
from flowrl_img.rollout import generate, root_keys
from flowrl_img.types import Sample


def pictures_of(trainer: Any, samples: Sequence[Sample], *, seed: int, **settings: Any) -> Tensor:
    """Float [B, 3, H, W] in [0, 1], with the weights that are active."""
    texts = [trainer.prompts.texts[s.prompt] for s in samples]
    return generate(Blend(Side(trainer.model)), texts, root_keys(samples, seed), **settings)
