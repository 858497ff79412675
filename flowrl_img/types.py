"""What travels through the loop: frozen records whose rows are joined by id, never by position.

    Prompts -> Rollout(leaves, edges) -> Scored(advantage [B]) -> points -> moments [R, 4 or 11] -> losses [R]

Legend of shapes: B samples, E edges (trained transitions), S stored states, V evaluated states, R rows of a
micro-batch, `...` one latent.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flowrl_img.samplers.steps.table import StepTable

__all__ = ["Edges", "Leaves", "MatchingMoments", "Moments", "PromptSet", "Rollout", "Sample", "Scored"]


@dataclass(frozen=True)
class PromptSet:
    """Prompts of one file. Example: PromptSet(("train/0",), ("a photo of a ring",), ({"tag": ...},))."""

    ids: tuple[str, ...]
    texts: tuple[str, ...]
    metadata: tuple[dict[str, Any], ...]

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Sample:
    """Identity of one image to draw. Example: Sample(prompt=17, group="3/17", image=5) is id "3/17/5"."""

    prompt: int
    """index into the PromptSet"""
    group: str
    """group id: the images that are compared with each other, those of one prompt in one rollout or of one fork"""
    image: int
    """index inside the group"""
    trunk: str = ""
    """id of the path that it was forked from; empty: it has a path of its own"""

    @property
    def id(self) -> str:
        return f"{self.group}/{self.image}"


@dataclass(frozen=True)
class Leaves:
    """Finished samples, B rows."""

    samples: tuple[Sample, ...]
    images: Tensor
    """[B, 3, H, W] float32 in [0, 1]"""
    latents: Tensor
    """[B, ...] float32, the clean latents x0 that were decoded"""


@dataclass(frozen=True)
class Edges:
    """Trained transitions, E rows, from V evaluated states. Everything is stored once and referenced.

    A window's x_s is its next step's x_t; the successors of a fork share x_t and its velocity, so V <= E.
    """

    states: Tensor
    """[S, ...] float32"""
    at_t: Tensor
    """[E] int64 row of x_t in states"""
    at_s: Tensor
    """[E] int64 row of x_s in states"""
    at_v: Tensor
    """[E] int64 row of the velocity at x_t in v_old; rising where edges of several samples do not share it"""
    leaf: Tensor
    """[E] int64 row of the sample in the leaves"""
    step: Tensor
    """[E] int64 step index into the sigma table"""
    v_old: Tensor
    """[V, ...] velocity of the sampling policy, guided; float32"""
    residual: Tensor
    """[E] float32: mean ((x_s - mu_old) / std)^2 at the rollout, taken from the noise that was added"""

    def __len__(self) -> int:
        return len(self.leaf)


@dataclass(frozen=True)
class Rollout:
    """All that one process drew in one rollout; `sigmas` is the table that everybody indexes."""

    leaves: Leaves
    sigmas: Tensor
    """float64 [N + 1]"""
    edges: Edges | None = None
    """none where the objective trains on clean samples"""
    table: StepTable | None = None
    """scalars of the N steps, with `edges`"""
    trained: tuple[int, ...] = ()
    """steps that are trained, with `edges`"""


@dataclass(frozen=True)
class Scored:
    """A rollout with its advantages, rows as in `rollout.leaves`, and what all processes agree on."""

    rollout: Rollout
    advantage: Tensor
    """[B] float32, cut at the configured range"""
    kept: Tensor
    """bool [B]: trained on. Not: without a score, in a group with fewer than two, not among the best and worst asked"""
    everything: tuple[Sample, ...]
    """the samples of all processes"""
    kept_groups: tuple[str, ...]
    """groups of all processes with a sample that is trained on, in order"""
    metrics: dict[str, float]


@dataclass(frozen=True)
class Moments:
    """Per-row means of one forward, [R] each, with the step scalars they belong to. See kernels.transition."""

    e2: Tensor
    dref2: Tensor
    dold2: Tensor
    cross: Tensor
    table: StepTable
    mean_std: float = 1.0
    """mean std over the steps that the rollout trains"""

    @classmethod
    def of(cls, columns: Tensor, table: StepTable, mean_std: float = 1.0) -> Moments:
        """columns: [R, 4] as `transition_moments` returns them."""
        e2, dref2, dold2, cross = columns.unbind(1)
        return cls(e2, dref2, dold2, cross, table, mean_std)

    def finite(self) -> bool:
        return bool(torch.stack([self.e2, self.dref2, self.dold2, self.cross]).isfinite().all())


@dataclass(frozen=True)
class MatchingMoments:
    """Per-row means of one forward at x_t = (1 - t) x0 + t eps, [R] each. See kernels.matching_moments.

    e2 = mean (v - v*)^2 with v* = eps - x0; d..2 = mean (v - w)^2 and gain_.. = e2 - mean (w - v*)^2 for the velocity w
    of another weight set; plus2, minus2, plus1, minus1: mean square and mean magnitude of the errors of the branches
    v_old +- beta (v - v_old). What the objective did not ask for is 0.
    """

    e2: Tensor
    dold2: Tensor
    gain_old: Tensor
    dref2: Tensor
    gain_ref: Tensor
    dtrust2: Tensor
    gain_trust: Tensor
    plus2: Tensor
    minus2: Tensor
    plus1: Tensor
    minus1: Tensor
    t: Tensor
    """[R] in (0, 1]"""
    unit_mean: Tensor | None = None
    """[R] without gradient: mean of the objective's `unit_score` over the row's sample or group"""

    @classmethod
    def of(cls, columns: Tensor, t: Tensor) -> MatchingMoments:
        """columns: [R, 11] as `matching_moments` returns them, v_ema being the velocity of the set `trust`."""
        return cls(*(*columns.unbind(1), t.to(columns)))

    def with_unit_mean(self, mean: Tensor) -> MatchingMoments:
        """The same rows, each with the mean over its unit."""
        return replace(self, unit_mean=mean)

    def finite(self) -> bool:
        return bool(torch.stack([self.e2, self.dold2, self.dref2, self.dtrust2]).isfinite().all())
