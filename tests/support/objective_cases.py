"""Synthetic points of either kind, and the loss and gradient of any objective on them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flowrl_img.moments import matching_of, transition_of, unit_means
from flowrl_img.samplers.schedules import flow_match_sigmas
from flowrl_img.samplers.steps.flow_sde import FlowSDE

UNIT_ROWS = 4
SETS = ("old", "trust", "reference")


@dataclass(frozen=True)
class Batch:
    """R rows at mixed times: whole units of UNIT_ROWS rows. latents: [R, ...] by name; of steps: [R]."""

    latents: dict[str, Tensor]
    steps: Tensor
    unit: Tensor
    advantage: Tensor

    def rows(self, index: Any) -> Batch:
        """Some rows, their units numbered anew."""
        unit = self.unit[index].unique(return_inverse=True)[1]
        latents = {name: x[index] for name, x in self.latents.items()}
        return Batch(latents, self.steps[index], unit, self.advantage[index])

    def having(self, advantage: Tensor | None = None, **latents: Tensor) -> Batch:
        """The same rows with other advantages or latents."""
        return replace(
            self, latents={**self.latents, **latents}, advantage=self.advantage if advantage is None else advantage
        )

    def packed(self) -> Batch:
        """[R, C, h, w] as [R, h w, C]."""
        return replace(self, latents={name: pack(x) for name, x in self.latents.items()})


def pack(x: Tensor) -> Tensor:
    return x.flatten(2).transpose(1, 2)


SIGMAS = flow_match_sigmas(10)
TABLE = FlowSDE(0.7).coefficients(SIGMAS)


def batch(
    objective: Any, units: int = 3, seed: int = 0, spread: float = 0.05, shape: tuple[int, ...] = (4, 4, 4)
) -> Batch:
    """Other sets' velocities and the current one ("v") lie `spread` apart; a unit of kind "group" is at one time."""
    generator = torch.Generator().manual_seed(seed)
    count = units * UNIT_ROWS

    def normal() -> Tensor:
        return torch.randn(count, *shape, generator=generator)

    unit = torch.arange(units).repeat_interleave(UNIT_ROWS)
    steps = torch.randint(0, 9, (count,), generator=generator)
    latents = {"x0": normal(), "eps": normal()}
    if objective.needs.unit == "group":
        steps = steps[unit * UNIT_ROWS]
        latents["eps"] = latents["eps"][unit * UNIT_ROWS]
    base = latents["eps"] - latents["x0"] + 0.5 * normal()
    latents |= {name: base + spread * normal() for name in ("v", *SETS)}
    column = (slice(None), *[None] * len(shape))
    t = SIGMAS[steps].float()[column]
    latents["x_t"] = (1 - t) * latents["x0"] + t * latents["eps"]
    A, B, std = (x[steps].float()[column] for x in (TABLE.A, TABLE.B, TABLE.std))
    latents["x_s"] = A * latents["x_t"] + B * latents["old"] + std * normal()
    advantage = torch.tensor([1.0, -1.0, 0.5, -0.5]).repeat(units)
    return Batch(latents, steps, unit, advantage)


def moments_of(objective: Any, points: Batch, v: Tensor) -> Any:
    """Moments of the velocity v, with unit means where the objective asks for them."""
    needs, x = objective.needs, points.latents
    others = {name: x[name] for name in needs.velocities}
    if needs.matching:
        moments = matching_of(needs, v, x["x0"], x["eps"], SIGMAS[points.steps], others)
    else:
        rows = TABLE.rows(points.steps)
        others["old"] = x["old"]
        moments = transition_of(needs, (v, None), 1.0, x["x_t"], x["x_s"], rows, others, float(TABLE.std[:9].mean()))
    if needs.unit != "row":
        score = objective.unit_score(moments, points.advantage)
        moments = moments.with_unit_mean(unit_means(score, points.unit, int(points.unit.max()) + 1))
    return moments


def loss_and_gradient(objective: Any, points: Batch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(loss [R], gradient of its sum with respect to v, metrics)."""
    v = points.latents["v"].clone().requires_grad_()
    loss, metrics = objective(moments_of(objective, points, v), points.advantage)
    (gradient,) = torch.autograd.grad(loss.sum(), v)
    return loss.detach(), gradient, metrics


def likelihood(objective: Any, points: Batch, v: Tensor) -> Tensor:
    """[R]: minus the matching error, or minus the error of the step's mean: what an objective should raise."""
    with torch.no_grad():
        return -moments_of(objective, points, v).e2
