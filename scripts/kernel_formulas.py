"""What `bench_kernels.py` times: each op's use, the same in eager code as published trainers write it, and its inputs.

The naive forms keep what costs time in published code: a cast and a temporary for every operation, log-probs of
every element before the mean, float64 in the weights of DiffusionNFT and in all of AWM. Left out: timing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl_img.kernels import guidance_torch, matching_moments_torch, step_torch, transition_torch
from flowrl_img.kernels import matching_moments as m
from flowrl_img.kernels.guidance import guided_velocity
from flowrl_img.kernels.logprob import kl, log_prob, log_ratio
from flowrl_img.kernels.matching import GeneralisedHuber, branch_loss
from flowrl_img.kernels.step import renoise, sde_step
from flowrl_img.kernels.transition import CROSS, DOLD2, DREF2, E2, transition_moments

__all__ = ["CASES", "Case", "Inputs"]

Inputs = dict[str, Tensor]
Results = tuple[Tensor, ...]
G, W, BETA = 4.5, 1.6, 0.1


@dataclass(frozen=True)
class Case:
    """One use of an op. `plain` is `fused` on the reference body without the op, for torch.compile to see through."""

    naive: Callable[[Inputs], Results]
    fused: Callable[[Inputs], Results]
    plain: Callable[[Inputs], Results]
    low: tuple[str, ...]
    """Latents in bfloat16: outputs of the network."""
    high: tuple[str, ...]
    """Latents in float32: states, noise, guided velocities."""
    trained: tuple[str, ...]
    counted: tuple[int, int]
    """Bytes per latent element that the fused forward and backward pass move: every input once, every output once."""

    def inputs(self, shape: tuple[int, ...], device: torch.device) -> Inputs:
        """Latents [R, ...] as training sees them: x_s is drawn from the old velocity, others are near it."""
        stream = torch.Generator(device).manual_seed(0)

        def draw() -> Tensor:
            return torch.randn(shape, generator=stream, device=device)

        near = draw()
        a = {name: (near + 1e-3 * draw()).bfloat16() for name in self.low}
        a |= {name: near + 1e-3 * draw() if name[0] == "v" else draw() for name in self.high}
        rows = torch.linspace(0.2, 0.9, shape[0], device=device)
        a |= {"t": rows, "A": 1 - 0.2 * rows, "B": -0.05 - 0.3 * rows, "std": 0.2 + 0.5 * rows}
        if "x_s" in a:
            mean = _wide(a["A"], near) * a["x_t"] + _wide(a["B"], near) * a["v_old"]
            a["x_s"] = mean + _wide(a["std"], near) * draw()
            a["log_prob_old"] = _naive_log_prob(a["x_s"], mean, _wide(a["std"], near))
        return a


def _wide(scalar: Tensor, like: Tensor) -> Tensor:
    return scalar.view(-1, *[1] * (like.ndim - 1))


def _mean(x: Tensor) -> Tensor:
    return x.mean(dim=tuple(range(1, x.ndim)))


def _naive_log_prob(x_s: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    density = -((x_s.detach() - mean) ** 2) / (2 * std**2) - torch.log(std) - math.log(math.sqrt(2 * math.pi))
    return _mean(density)


# --- a transition: log-prob, log-ratio, KL --------------------------------------------------------------------------


def naive_transition(a: Inputs) -> Results:
    A, B, std = (_wide(a[k], a["x_t"]) for k in ("A", "B", "std"))
    v = a["v_uncond"].float() + G * (a["v_cond"].float() - a["v_uncond"].float())
    mean, mean_ref = a["x_t"] * A + v * B, a["x_t"] * A + a["v_ref"] * B
    found = _naive_log_prob(a["x_s"], mean, std)
    _naive_log_prob(a["x_s"], mean_ref, std)  # published code forms it for the reference too, and leaves it
    return found, found - a["log_prob_old"], _mean((mean - mean_ref) ** 2) / (2 * a["std"] ** 2)


def _scored(M: Tensor, a: Inputs) -> Results:
    B, std = a["B"], a["std"]
    return log_prob(M[:, E2], std), log_ratio(M[:, DOLD2], M[:, CROSS], B, std), kl(M[:, DREF2], B, std)


def fused_transition(a: Inputs) -> Results:
    states = (a["x_t"], a["x_s"], a["A"], a["B"])
    return _scored(transition_moments(a["v_cond"], a["v_uncond"], G, *states, v_old=a["v_old"], v_ref=a["v_ref"]), a)


def plain_transition(a: Inputs) -> Results:
    states = (a["x_t"], a["x_s"], a["A"], a["B"])
    inputs = transition_torch.Inputs(a["v_cond"], a["v_uncond"], G, *states, a["v_old"], a["v_ref"])
    return _scored(transition_torch.forward(inputs), a)


# --- matching: DiffusionNFT and AWM ---------------------------------------------------------------------------------


def naive_nft(a: Inputs) -> Results:
    t, x0 = _wide(a["t"], a["x0"]), a["x0"]
    x_t = (1 - t) * x0 + t * a["eps"]
    v, old = a["v"], a["v_old"].detach()
    losses = []
    for branch in (BETA * v + (1 - BETA) * old, (1 + BETA) * old - BETA * v):
        clean = x_t - t * branch
        with torch.no_grad():
            weight = _wide(_mean((clean.double() - x0.double()).abs()).clamp(min=1e-5), x0)
        losses.append(_mean((clean - x0) ** 2 / weight))
    return *losses, _mean((v.float() - a["v_ref"].float()) ** 2)


def _branches(M: Tensor, a: Inputs) -> Results:
    plus, minus = branch_loss(M[:, m.PLUS2], M[:, m.PLUS1], a["t"]), branch_loss(M[:, m.MINUS2], M[:, m.MINUS1], a["t"])
    return plus, minus, M[:, m.DREF2]


def fused_nft(a: Inputs) -> Results:
    M = m.matching_moments(a["v"], a["x0"], a["eps"], v_old=a["v_old"], v_ref=a["v_ref"], beta=BETA)
    return _branches(M, a)


def plain_nft(a: Inputs) -> Results:
    inputs = matching_moments_torch.Inputs(a["v"], a["x0"], a["eps"], v_old=a["v_old"], v_ref=a["v_ref"], beta=BETA)
    return _branches(matching_moments_torch.forward(inputs), a)


def naive_awm(a: Inputs) -> Results:
    v, target = a["v"].double(), a["eps"].double() - a["x0"].double()
    error, t = _mean((v - target) ** 2), a["t"].double()
    surrogate = -t / 0.25 * ((error + 1e-10) ** 0.25 - 1e-10**0.25)
    return surrogate, _mean((a["v"].float() - a["v_ref"].float()) ** 2)


def _surrogate(M: Tensor, a: Inputs) -> Results:
    return -GeneralisedHuber()(M[:, m.E2], a["t"]), M[:, m.DREF2]


def fused_awm(a: Inputs) -> Results:
    return _surrogate(m.matching_moments(a["v"], a["x0"], a["eps"], v_ref=a["v_ref"]), a)


def plain_awm(a: Inputs) -> Results:
    inputs = matching_moments_torch.Inputs(a["v"], a["x0"], a["eps"], v_ref=a["v_ref"])
    return _surrogate(matching_moments_torch.forward(inputs), a)


# --- guidance, blend, steps -----------------------------------------------------------------------------------------


def _naive_guidance(cond: Tensor, uncond: Tensor) -> Tensor:
    return uncond.float() + G * (cond.float() - uncond.float())


def naive_blend(a: Inputs) -> Results:
    base = _naive_guidance(a["base_cond"], a["base_uncond"])
    return (base + W * (_naive_guidance(a["v_cond"], a["v_uncond"]) - base),)


def fused_blend(a: Inputs) -> Results:
    sides = {"base_cond": a["base_cond"], "base_uncond": a["base_uncond"]}
    return (guided_velocity(a["v_cond"], a["v_uncond"], G, **sides, weight=W),)


def naive_step(a: Inputs) -> Results:
    A, B, std = (_wide(a[k], a["x_t"]) for k in ("A", "B", "std"))
    mean = a["x_t"].float() * A + a["v"].float() * B
    x_s = mean + std * a["noise"]
    return x_s, _naive_log_prob(x_s, mean.detach(), std)


def fused_step(a: Inputs) -> Results:
    x_s, error = sde_step(a["x_t"], a["v"], a["noise"], a["A"], a["B"], a["std"])
    return x_s, log_prob(error, a["std"])


def plain_step(a: Inputs) -> Results:
    dtype = a["x_t"].dtype
    x_s, error = step_torch.forward(a["x_t"], a["A"], a["v"], a["B"], a["noise"], a["std"], dtype, True)
    return x_s, log_prob(error.detach(), a["std"])


def naive_renoise(a: Inputs) -> Results:
    t = _wide(a["t"], a["x0"])
    return ((1 - t) * a["x0"] + t * a["eps"],)


CASES = {
    "transition": Case(
        naive_transition,
        fused_transition,
        plain_transition,
        ("v_cond", "v_uncond"),
        ("x_t", "x_s", "v_old", "v_ref"),
        ("v_cond", "v_uncond"),
        (20, 24),
    ),
    "nft": Case(naive_nft, fused_nft, plain_nft, ("v", "v_old", "v_ref"), ("x0", "eps"), ("v",), (14, 16)),
    "awm": Case(naive_awm, fused_awm, plain_awm, ("v", "v_ref"), ("x0", "eps"), ("v",), (12, 14)),
    "guidance": Case(
        lambda a: (_naive_guidance(a["v_cond"], a["v_uncond"]),),
        lambda a: (guided_velocity(a["v_cond"], a["v_uncond"], G),),
        lambda a: (guidance_torch.guide(a["v_cond"], a["v_uncond"], G),),
        ("v_cond", "v_uncond"),
        (),
        ("v_cond", "v_uncond"),
        (8, 8),
    ),
    "blend": Case(
        naive_blend,
        fused_blend,
        lambda a: (guidance_torch.forward(a["v_cond"], a["v_uncond"], G, a["base_cond"], a["base_uncond"], W),),
        ("v_cond", "v_uncond", "base_cond", "base_uncond"),
        (),
        ("v_cond", "v_uncond"),
        (12, 8),
    ),
    "step": Case(naive_step, fused_step, plain_step, (), ("x_t", "v", "noise"), ("v",), (16, 8)),
    "renoise": Case(
        naive_renoise,
        lambda a: (renoise(a["x0"], a["eps"], a["t"]),),
        lambda a: (step_torch.forward(a["x0"], 1 - a["t"], a["eps"], a["t"], None, None, a["x0"].dtype, False)[0],),
        (),
        ("x0", "eps"),
        ("x0",),
        (12, 8),
    ),
}
