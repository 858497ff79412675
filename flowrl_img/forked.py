"""Forked rollouts: every sample of a fork is a picture of its own, and its reward belongs to one transition.

Trunks are what processes share and updates deal; a leaf is named after its trunk, the step it left it at and its
branch. All noise is keyed by these names. Source: TempFlow-GRPO, arXiv 2508.04324.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flowrl_img import seeds
from flowrl_img.edges import forked_edges, join
from flowrl_img.guidance import guided
from flowrl_img.rollout import SDE_SEED, leaves_of, levels_of, root_keys
from flowrl_img.samplers.fork import fork
from flowrl_img.types import Edges, PromptSet, Rollout, Sample

__all__ = ["forks_of", "roll_forked"]


def forks_of(trunk: Sample, steps: Sequence[int], branches: int) -> list[Sample]:
    """The samples of one trunk, step-major. The successors of one state are a group."""
    return [
        Sample(trunk.prompt, f"{trunk.id}@{step}", branch, trunk.id) for step in steps for branch in range(branches)
    ]


@torch.no_grad()
def roll_forked(
    model: Any, prompts: PromptSet, trunks: Sequence[Sample], *, num_steps: int, guidance: float, step_rule: Any,
    stochastic: Sequence[int], branches: int, seed: int, batch: int, shared_noise: bool = False,
    progress: Callable[[int], None] = lambda n: None,
) -> Rollout:  # fmt: skip
    """Fork every trunk at the steps `stochastic`. batch: states that are evaluated, and pictures decoded, at once."""
    sigmas = model.sigmas(num_steps)
    table = step_rule.coefficients(sigmas)
    steps = sorted(stochastic)
    size = max(1, batch // (branches * len(steps)))
    samples: list[Sample] = []
    parts: list[Edges] = []
    latents: list[Tensor] = []
    images: list[Tensor] = []
    for start in range(0, len(trunks), size):
        chunk = trunks[start : start + size]
        walker = _Walker(model, [prompts.texts[s.prompt] for s in chunk], guidance, batch)
        noise = _noise(model, chunk, branches, seed)
        x_1 = seeds.normal(root_keys(chunk, seed, shared=shared_noise), model.latent_shape, model.device)
        found = fork(walker, x_1, sigmas, step_rule, steps, branches, noise)
        parts.append(forked_edges(found, table, len(samples)))
        samples += [s for trunk in chunk for s in forks_of(trunk, steps, branches)]
        x0 = torch.stack([found.x0[step] for step in steps], 1).flatten(0, 2)
        latents.append(x0)
        images += [model.decode(piece) for piece in x0.split(batch)]
        progress(len(chunk))
    return Rollout(leaves_of(model, samples, images, latents), sigmas, join(parts), table, tuple(steps))


class _Walker:
    """The velocity of states from several trunks, `batch` at once."""

    def __init__(self, model: Any, texts: Sequence[str], guidance: float, batch: int) -> None:
        self.model, self.texts, self.guidance, self.batch = model, texts, guidance, batch

    def __call__(self, x_t: Tensor, lane: Tensor, step: int, sigma: float) -> Tensor:
        parts = []
        for x, lanes in zip(x_t.split(self.batch), lane.split(self.batch)):
            texts = [self.texts[k] for k in lanes.tolist()]
            parts.append(guided(self.model, x, levels_of(x, sigma), texts, self.guidance))
        return torch.cat(parts)


def _noise(model: Any, chunk: Sequence[Sample], branches: int, seed: int) -> Callable[[int], Tensor]:
    def noise(step: int) -> Tensor:
        names = [s.id for trunk in chunk for s in forks_of(trunk, [step], branches)]
        keys = [seeds.key(seed, SDE_SEED, name, step) for name in names]
        return seeds.normal(keys, model.latent_shape, model.device).unflatten(0, (len(chunk), branches))

    return noise
