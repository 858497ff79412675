"""Independent rollouts: every sample walks from its own noise to an image.

`roll` keeps the trained transitions as edges; `draw` and `generate` keep none and may use any solver. No gradient is
recorded. Noise is keyed by (run seed, rollout, group, image, step), so a sample does not depend on its
batch mates, on the process that draws it, or on what was drawn before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowrl_img import seeds
from flowrl_img.blend import Blend
from flowrl_img.edges import join, walk_edges
from flowrl_img.guidance import guided
from flowrl_img.samplers.loop import sample
from flowrl_img.samplers.solve import solve
from flowrl_img.samplers.solvers.euler import Euler
from flowrl_img.samplers.solvers.table import Solver
from flowrl_img.samplers.tail import FlashTail, sample_with_tail
from flowrl_img.types import Edges, Leaves, PromptSet, Rollout, Sample

__all__ = ["EULER", "SDE_SEED", "draw", "generate", "leaves_of", "levels_of", "roll", "root_keys"]

Progress = Callable[[int], None]
EULER = Euler()
ROOT_SEED = "root"  # namespaces of the keys
SDE_SEED = "sde"


@torch.no_grad()
def roll(
    model: Any, prompts: PromptSet, samples: Sequence[Sample], *, num_steps: int, guidance: float, step_rule: Any,
    stochastic: Sequence[int], seed: int, batch: int, shared_noise: bool = False, tail: FlashTail | None = None,
    progress: Progress = lambda n: None,
) -> Rollout:  # fmt: skip
    """Draw `samples`, stochastic at the steps `stochastic`, all of which are kept. Returns one process's rollout.

    tail: what follows the last stochastic step in place of the rest of the grid; the kept steps are the same bits.
    """
    sigmas = model.sigmas(num_steps)
    table = step_rule.coefficients(sigmas)
    parts: list[Edges] = []
    latents: list[Tensor] = []
    images: list[Tensor] = []
    done = 0
    common = common_steps(stochastic) if shared_noise else 0
    for chunk in _chunks(model, prompts, samples, batch, guidance, seed, shared_noise, common):
        steps = (sigmas, step_rule, stochastic, chunk.noise)
        if tail is None:
            walk = sample(chunk.velocity, chunk.start(), *steps, keep=stochastic)
        else:
            walk = sample_with_tail(chunk.velocity, chunk.start(), *steps, tail, keep=stochastic)
        parts.append(walk_edges(walk, table, done, len(walk.x0)))
        done += len(walk.x0)
        latents.append(walk.x0)
        images.append(model.decode(walk.x0))
        progress(len(walk.x0))
    return Rollout(leaves_of(model, samples, images, latents), sigmas, join(parts), table, tuple(stochastic))


@torch.no_grad()
def draw(
    model: Any, prompts: PromptSet, samples: Sequence[Sample], *, num_steps: int, guidance: float, solver: Solver,
    seed: int, batch: int, shared_noise: bool = False, progress: Progress = lambda n: None,
) -> Leaves:  # fmt: skip
    """The leaves of a rollout that needs no log-prob: any solver, stochastic or not, and nothing of the path kept."""
    latents: list[Tensor] = []
    images: list[Tensor] = []
    for chunk in _chunks(model, prompts, samples, batch, guidance, seed, shared_noise):
        latents.append(solve(chunk.velocity, chunk.start(), model.sigmas(num_steps), solver, chunk.noise))
        images.append(model.decode(latents[-1]))
        progress(len(latents[-1]))
    return leaves_of(model, samples, images, latents)


@torch.no_grad()
def generate(
    blend: Blend, texts: Sequence[str], keys: Sequence[int], *, num_steps: int, guidance: float, batch: int,
    solver: Solver = EULER, progress: Progress = lambda n: None,
) -> Tensor:  # fmt: skip
    """Images of a solver, by default the plain ODE sampler: float32 [B, 3, H, W] in [0, 1], on the CPU.

    keys: the seed of each image's initial noise, which is that of a stock pipeline with `manual_seed(key)`.
    """
    model = blend.model
    images = [torch.zeros(0, 3, model.resolution, model.resolution)]
    for start in range(0, len(texts), batch):
        own, chunk = keys[start : start + batch], texts[start : start + batch]

        def velocity(x_t: Tensor, step: int, sigma: float, chunk: Sequence[str] = chunk) -> Tensor:
            return blend.velocity(x_t, levels_of(x_t, sigma), chunk, guidance, step, num_steps)

        def noise(step: int, own: Sequence[int] = own) -> Tensor:
            return seeds.normal([seeds.key(key, SDE_SEED, step) for key in own], model.latent_shape, model.device)

        x_1 = seeds.normal(own, model.latent_shape, model.device)
        images.append(model.decode(solve(velocity, x_1, model.sigmas(num_steps), solver, noise)).cpu())
        progress(len(chunk))
    return torch.cat(images)


def root_keys(samples: Sequence[Sample], seed: int, *, shared: bool = False) -> list[int]:
    """Seeds of the initial noise, by (run seed, sample); shared: one for a whole group."""
    return [seeds.key(seed, ROOT_SEED, s.group if shared else s.id) for s in samples]


def common_steps(stochastic: Sequence[int]) -> int:
    """Steps whose velocity is one for all members of a group that starts from one noise: up to the first draw."""
    return min(stochastic) + 1


def levels_of(x_t: Tensor, sigma: float) -> Tensor:
    """One level for all states, float64 [B]."""
    return torch.full((len(x_t),), sigma, dtype=torch.float64, device=x_t.device)


@dataclass(frozen=True)
class _Chunk:
    """What a sampling loop asks about samples drawn together: their start, their velocity and their noise."""

    model: Any
    samples: Sequence[Sample]
    texts: Sequence[str]
    guidance: float
    seed: int
    shared_noise: bool
    common: int = 0
    """the steps before this one are computed once for all members of a group, which are one state there"""

    def start(self) -> Tensor:
        return self._normal(root_keys(self.samples, self.seed, shared=self.shared_noise))

    def velocity(self, x_t: Tensor, step: int, sigma: float) -> Tensor:
        if step >= self.common:
            return guided(self.model, x_t, levels_of(x_t, sigma), self.texts, self.guidance)
        groups = [s.group for s in self.samples]
        names = list(dict.fromkeys(groups))
        first = [groups.index(name) for name in names]
        x_t, texts = x_t[first], [self.texts[k] for k in first]
        v = guided(self.model, x_t, levels_of(x_t, sigma), texts, self.guidance)
        return v[[names.index(group) for group in groups]]

    def noise(self, step: int) -> Tensor:
        return self._normal([seeds.key(self.seed, SDE_SEED, s.id, step) for s in self.samples])

    def _normal(self, keys: Sequence[int]) -> Tensor:
        return seeds.normal(keys, self.model.latent_shape, self.model.device)


def _chunks(
    model: Any, prompts: PromptSet, samples: Sequence[Sample], batch: int, guidance: float, seed: int,
    shared_noise: bool, common: int = 0,
) -> Iterator[_Chunk]:  # fmt: skip
    for start in range(0, len(samples), batch):
        chunk = samples[start : start + batch]
        yield _Chunk(model, chunk, [prompts.texts[s.prompt] for s in chunk], guidance, seed, shared_noise, common)


def leaves_of(model: Any, samples: Sequence[Sample], images: Sequence[Tensor], latents: Sequence[Tensor]) -> Leaves:
    no_images, no_latents = torch.zeros(0, 3, model.resolution, model.resolution), torch.zeros(0, *model.latent_shape)
    return Leaves(
        tuple(samples),
        torch.cat([*images]) if images else no_images,
        torch.cat([*latents]) if latents else no_latents,
    )
