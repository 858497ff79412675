"""What the rewards that are neural networks share: device, precision, embeddings, truncated prompts, the output.

Scores are float32 whatever the caller's autocast: a scorer that inherited bf16 would move its scores by as much as the
pictures of a group differ.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flowrl_img.rewards.pretrained import WeightsError
from flowrl_img.rewards.protocol import RewardOutput

__all__ = ["ScoreHead", "Truncation", "frozen", "full_precision", "output_of", "pick_device", "scoring", "unit"]

Network = TypeVar("Network", bound=nn.Module)


def pick_device(name: str) -> torch.device:
    """ "auto" is the current GPU where there is one, else the CPU; any other name is torch's own."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def frozen(load: Callable[[], Network], device: torch.device) -> Network:
    """What `load` gives, in eval mode, without gradients, on the device.

    Loading is lazy and may begin inside inference mode, whose weights could not be differentiated through later.
    """
    with torch.inference_mode(False):
        return load().eval().requires_grad_(False).to(device)


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Autocast off, whatever the caller has on."""
    with torch.autocast(device.type, enabled=False):
        yield


@contextmanager
def scoring(device: torch.device) -> Iterator[None]:
    """`full_precision` without gradients."""
    with torch.inference_mode(), full_precision(device):
        yield


def unit(features: Tensor) -> Tensor:
    """features: [B, D]. Rows of length 1; a row of zeros or with a non-finite number becomes NaN.

    A zero embedding has no direction: `F.normalize` alone would give it cosine 0 with everything, which is a verdict.
    """
    features = features.float()
    length = features.norm(dim=-1, keepdim=True)
    return torch.where((length > 0) & length.isfinite(), F.normalize(features, dim=-1), torch.nan)


def output_of(values: Tensor, cut: Sequence[bool] | None = None) -> RewardOutput:
    """values: [B] on any device, NaN where an embedding was no direction. cut: the prompt was longer than is read."""
    numbers = values.detach().float().cpu().tolist()
    errors = [None if math.isfinite(number) else "the embedding is zero or not finite" for number in numbers]
    details: dict[str, list[Any]] = {"error": errors}
    if cut is not None:
        details["truncated"] = list(cut)
    return RewardOutput.of(numbers, details)


class Truncation:
    """Counts the prompts that are longer than a model reads, and warns once. limit: tokens, start and end included."""

    def __init__(self, name: str, limit: int) -> None:
        self.name, self.limit = name, limit
        self.seen = self.cut = 0
        self._told = False

    def count(self, lengths: Sequence[int]) -> list[bool]:
        """lengths: tokens of each prompt before truncation. Which of them are cut."""
        cut = [length > self.limit for length in lengths]
        self.seen, self.cut = self.seen + len(cut), self.cut + sum(cut)
        if any(cut) and not self._told:
            self._told = True
            warnings.warn(
                f"reward '{self.name}' reads {self.limit} tokens: {sum(cut)} of {len(cut)} prompts "
                f"({sum(cut) / len(cut):.0%}) are longer, and what their ends ask for is not rewarded",
                stacklevel=2,
            )
        return cut


class ScoreHead(nn.Module):
    """Five linear layers without activations, so one affine map: `width` -> 1024 -> 128 -> 64 -> 16 -> 1.

    The checkpoints number their dropouts too, hence the gaps in the names. Nothing is dropped here in any mode.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        gap = nn.Identity
        self.layers = nn.Sequential(
            nn.Linear(width, 1024), gap(), nn.Linear(1024, 128), gap(), nn.Linear(128, 64), gap(),
            nn.Linear(64, 16), nn.Linear(16, 1),
        )  # fmt: skip

    def forward(self, features: Tensor) -> Tensor:
        """features: [B, width]. [B]"""
        if features.shape[-1] != self.width:
            raise WeightsError(
                f"this head reads {self.width} numbers, the model gives {features.shape[-1]}; "
                "give the model that the head was trained on"
            )
        return self.layers(features).squeeze(-1)
