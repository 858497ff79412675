"""Reinforcement learning guidance: the velocity of a base model, moved along what tuning changed.

    v = v_base + sum_k w_k (v_tuned_k - v_base)

One tuned side at weight w is the usual case: 0 base, 1 tuned, between them an interpolation, above 1 an extrapolation.
The blend is of network outputs, never of weights: a network is not linear in its weights. It is linear in the outputs,
so blending before classifier-free guidance equals blending after it. Source: arXiv 2508.21016.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from flowrl_img.guidance import branches
from flowrl_img.kernels.guidance import guided_velocity
from flowrl_img.scales import Constant, Scale

__all__ = ["Blend", "Branches", "Side", "blended", "nominal_kl"]

Branches = tuple[Tensor, Tensor | None]
"""(v_cond, v_uncond) of one model, [B, ...] each; None: no classifier-free guidance."""


def blended(
    weights: Sequence[float],
    base: Callable[[], Branches],
    tuned: Sequence[Callable[[], Branches]],
    guidance: float = 1.0,
) -> Tensor:
    """The guided blend, float32 (float64 for float64 branches). weights[k] belongs to tuned[k].

    Only what is needed is evaluated: the base alone where every weight is 0; one tuned side alone where its weight is
    1 and the others are 0, so that both cost one forward and are those models to the bit.
    """
    acting = [k for k, weight in enumerate(weights) if weight != 0]
    if not acting:
        return guided_velocity(*base(), guidance)
    if [weights[k] for k in acting] == [1]:
        return guided_velocity(*tuned[acting[0]](), guidance)
    base_cond, base_uncond = base()
    v_base = guided_velocity(base_cond, base_uncond, guidance) if len(acting) > 1 else None
    total: Tensor | None = None
    for k in acting:
        cond, uncond = tuned[k]()
        if weights[k] == 1:  # the op returns a tuned side of weight 1 without reading the base
            moved = guided_velocity(cond, uncond, guidance)
        else:
            moved = guided_velocity(
                cond, uncond, guidance, base_cond=base_cond, base_uncond=base_uncond, weight=weights[k]
            )
        total = moved if total is None or v_base is None else total + (moved - v_base)
    assert total is not None
    return total


@dataclass(frozen=True)
class Side:
    """One model of a blend: a generator, and the context in which it has this side's weights.

    Example: `Side(model, lambda: weights.use("reference"))` and `Side(model, lambda: weights.use("ema"))` are two sides
    of one network; `Side(other_model)` is a second checkpoint.
    """

    model: Any
    weights: Callable[[], AbstractContextManager[Any]] = nullcontext

    def branches(self, x_t: Tensor, sigma: Tensor, texts: Sequence[str], guidance: float) -> Branches:
        """(v_cond, v_uncond) in the network's dtype. x_t: [B, ...] float32; sigma: [B] in [0, 1]."""
        with self.weights():
            return branches(self.model, x_t, sigma, texts, guidance)


@dataclass(frozen=True)
class Blend:
    """A generator made of a base and tuned sides, each with its scale; without a tuned side it is the base alone."""

    base: Side
    tuned: tuple[Side, ...] = ()
    scales: tuple[Scale, ...] = ()

    def __post_init__(self) -> None:
        if len(self.tuned) != len(self.scales):
            raise ValueError(f"every tuned side needs a scale: {len(self.tuned)} sides, {len(self.scales)} scales")

    @property
    def model(self) -> Any:
        """The generator that makes noise shapes, sigma tables and pictures for all sides."""
        return self.base.model

    def velocity(
        self, x_t: Tensor, sigma: Tensor, texts: Sequence[str], guidance: float, step: int, num_steps: int
    ) -> Tensor:
        """The guided blend at step `step` of `num_steps`, float32. x_t: [B, ...]; sigma: [B] in [0, 1]."""
        return blended(
            [scale(step, num_steps) for scale in self.scales],
            lambda: self.base.branches(x_t, sigma, texts, guidance),
            [lambda side=side: side.branches(x_t, sigma, texts, guidance) for side in self.tuned],  # type: ignore[misc]
            guidance,
        )


def nominal_kl(kl_weight: float, scale: Scale) -> str | None:
    """One line on the KL weight that `scale` stands for, or None where the run had no KL term or w is 1 or not above 0.

    For p_tuned ~ p_base exp(R / beta) the geometric mix p_base^(1 - w) p_tuned^w is p_base exp(w R / beta): the optimum
    at KL weight beta / w. Exact for the densities of clean pictures; the blended sampling process follows it only
    approximately.
    """
    if kl_weight <= 0 or not isinstance(scale, Constant) or scale.weight <= 0 or scale.weight == 1:
        return None
    return f"scale {scale}: nominal KL weight {kl_weight:g} / {scale} = {kl_weight / scale.weight:.3g}"
