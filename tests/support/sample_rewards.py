"""Rewards that the trainer tests load by dotted path."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from flowrl_img.rewards.protocol import RewardOutput, groups_of


def constant(images, prompts, metadata):
    return torch.full((len(images),), 0.35)


def brightness(images, prompts, metadata):
    return images.float().mean(dim=(1, 2, 3)) / 255


def broken_for_rings(images, prompts, metadata):
    return [None if "ring" in p else float(i.float().mean()) for i, p in zip(images, prompts, strict=True)]


@dataclass(frozen=True)
class Contest:
    """Groupwise: the share of the group that is darker."""

    name: ClassVar[str] = "contest"
    needs: ClassVar[frozenset[str]] = frozenset()
    scope: ClassVar[str] = "group"

    def validate(self, prompts, metadata):
        pass

    def __call__(self, batch):
        levels = batch.images.double().mean(dim=(1, 2, 3))
        values = torch.zeros(len(batch))
        for rows in groups_of(batch, self.name).values():
            own = levels[rows]
            values[rows] = (own[:, None] > own).float().mean(1)
        return RewardOutput.of(values.tolist(), {"mates": [batch.group_ids.count(g) for g in batch.group_ids]})
