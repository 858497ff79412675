"""Independent rollouts: every sample walks from its own noise to an image; trained transitions are kept as edges.

No gradient is recorded. Noise is keyed by (run seed, rollout, group, image, step), so a sample does not depend on its
batch mates, on the process that draws it, or on what was drawn before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flowrl_img import seeds
from flowrl_img.guidance import guided
from flowrl_img.samplers.loop import Trajectory, sample
from flowrl_img.samplers.steps.ode import ODE
from flowrl_img.types import Edges, Leaves, PromptSet, Rollout, Sample

__all__ = ["generate", "roll"]

Progress = Callable[[int], None]
ROOT_SEED = "root"  # namespaces of the keys
SDE_SEED = "sde"


@torch.no_grad()
def roll(
    model: Any, prompts: PromptSet, samples: Sequence[Sample], *, num_steps: int, guidance: float, step_rule: Any,
    stochastic: Sequence[int], seed: int, batch: int, shared_noise: bool = False, progress: Progress = lambda n: None,
) -> Rollout:  # fmt: skip
    """Draw `samples`, stochastic at the steps `stochastic`, all of which are kept. Returns one process's rollout."""
    sigmas = model.sigmas(num_steps)
    table = step_rule.coefficients(sigmas)
    parts, images = [], []
    for start in range(0, len(samples), batch):
        chunk = samples[start : start + batch]
        walk = _walk(model, prompts, chunk, sigmas, step_rule, stochastic, guidance, seed, shared_noise)
        parts.append(_edges(walk, table, start, len(chunk)))
        images.append(model.decode(walk.x0))
        progress(len(chunk))
    empty = torch.zeros(0, 3, model.resolution, model.resolution)
    return Rollout(Leaves(tuple(samples), torch.cat(images) if images else empty), _join(parts), sigmas, table)


@torch.no_grad()
def generate(
    model: Any, prompts: PromptSet, samples: Sequence[Sample], *, num_steps: int, guidance: float, seed: int,
    batch: int, progress: Progress = lambda n: None,
) -> Tensor:  # fmt: skip
    """Images of the plain ODE sampler, float32 [B, 3, H, W] in [0, 1], on the CPU; nothing is kept."""
    sigmas = model.sigmas(num_steps)
    images = []
    for start in range(0, len(samples), batch):
        chunk = samples[start : start + batch]
        walk = _walk(model, prompts, chunk, sigmas, ODE(), (), guidance, seed, False)
        images.append(model.decode(walk.x0).cpu())
        progress(len(chunk))
    return torch.cat(images)


def _walk(
    model: Any, prompts: PromptSet, chunk: Sequence[Sample], sigmas: Tensor, step_rule: Any, stochastic: Sequence[int],
    guidance: float, seed: int, shared_noise: bool,
) -> Trajectory:  # fmt: skip
    texts = [prompts.texts[s.prompt] for s in chunk]
    roots = [s.group if shared_noise else s.id for s in chunk]
    x_1 = seeds.normal([seeds.key(seed, ROOT_SEED, r) for r in roots], model.latent_shape, model.device)

    def velocity(x_t: Tensor, step: int, sigma: float) -> Tensor:
        times = torch.full((len(chunk),), sigma, dtype=torch.float64, device=x_t.device)
        return guided(model, x_t, times, texts, guidance)

    def noise(step: int) -> Tensor:
        return seeds.normal([seeds.key(seed, SDE_SEED, s.id, step) for s in chunk], model.latent_shape, model.device)

    return sample(velocity, x_1, sigmas, step_rule, stochastic, noise, keep=stochastic)


def _edges(walk: Trajectory, table: Any, first_leaf: int, rows: int) -> Edges:
    """Edges of one chunk, step-major. A state that two kept steps share is stored once."""
    states: list[Tensor] = []
    at_t, at_s, residuals = [], [], []
    for step, kept in sorted(walk.kept.items()):
        if not states or states[-1] is not kept.x_t:
            states.append(kept.x_t)
        states.append(kept.x_s)
        at_t.append(len(states) - 2)
        at_s.append(len(states) - 1)
        mean = float(table.A[step]) * kept.x_t + float(table.B[step]) * kept.v
        residuals.append(((kept.x_s - mean) / float(table.std[step])).square().flatten(1).mean(1))
    lane = torch.arange(rows)

    def spread(places: list[int]) -> Tensor:
        return torch.cat([place * rows + lane for place in places])

    return Edges(
        states=torch.cat(states),
        at_t=spread(at_t),
        at_s=spread(at_s),
        leaf=(first_leaf + lane).repeat(len(walk.kept)),
        step=torch.tensor(sorted(walk.kept)).repeat_interleave(rows),
        v_old=torch.cat([walk.kept[step].v for step in sorted(walk.kept)]),
        residual=torch.cat(residuals),
    )


def _join(parts: Sequence[Edges]) -> Edges:
    """One process's edges, sorted by (sample, step)."""
    offsets = torch.tensor([0, *[len(p.states) for p in parts]]).cumsum(0)
    joined = Edges(
        states=torch.cat([p.states for p in parts]),
        at_t=torch.cat([p.at_t + o for p, o in zip(parts, offsets, strict=False)]),
        at_s=torch.cat([p.at_s + o for p, o in zip(parts, offsets, strict=False)]),
        leaf=torch.cat([p.leaf for p in parts]),
        step=torch.cat([p.step for p in parts]),
        v_old=torch.cat([p.v_old for p in parts]),
        residual=torch.cat([p.residual for p in parts]),
    )
    order = torch.argsort(joined.leaf * (int(joined.step.max()) + 1) + joined.step)
    return Edges(
        joined.states, joined.at_t[order], joined.at_s[order], joined.leaf[order], joined.step[order],
        joined.v_old[order.to(joined.v_old.device)], joined.residual[order.to(joined.residual.device)],
    )  # fmt: skip
