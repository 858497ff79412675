"""Every fused op but the transition, as cases of one form: how to call it, its definition, what gets a gradient.

The transition has its own file of tests; what is asked of these ops alike is in tests/kernels/test_every_op.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl_img.kernels import guidance, matching_moments, step

SHAPES = [(2, 4, 8, 8), (3, 7, 5), (2, 3, 2, 5, 3), (1, 1, 1, 1), (5, 129)]
# Half an ulp, relative; float32: a dozen operations of 6e-8 each, and guidance that scales their errors.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class OpCase:
    """`call` and `naive` map named inputs to one tensor; `op` is the module and name of the registered op."""

    call: Callable[[Inputs], Tensor]
    naive: Callable[[Inputs], Tensor]
    trained: tuple[str, ...]
    constant: tuple[str, ...]
    scalars: tuple[str, ...]
    op: tuple[object, str]

    def inputs(
        self,
        shape: tuple[int, ...],
        v_dtype: torch.dtype = torch.float64,
        x_dtype: torch.dtype = torch.float64,
        device: str = "cpu",
    ) -> Inputs:
        """Normal latents (velocities in v_dtype, states and noise in x_dtype), float64 scalars in (0.2, 1)."""
        stream = torch.Generator().manual_seed(0)
        latents = {
            name: torch.randn(shape, generator=stream, dtype=torch.float64).to(v_dtype if name[0] in "vb" else x_dtype)
            for name in (*self.trained, *self.constant)
        }
        scalars = {k: 0.2 + 0.8 * torch.rand(shape[0], generator=stream, dtype=torch.float64) for k in self.scalars}
        return {name: x.to(device) for name, x in (latents | scalars).items()}

    def differentiate(self, f: Callable[[Inputs], Tensor], inputs: Inputs) -> tuple[Tensor, dict[str, Tensor]]:
        """f and the gradients of a fixed weighting of it, by name of the trained input."""
        leaves = {name: inputs[name].detach().clone().requires_grad_() for name in self.trained}
        out = f(inputs | leaves)
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 10
        (out * weights.to(out)).sum().backward()
        return out.detach(), {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def wide(inputs: Inputs) -> Inputs:
    """Everything in float64."""
    return {name: x.double() for name, x in inputs.items()}


def strided(x: Tensor) -> Tensor:
    """The same numbers under other strides; scalars as they are."""
    order = (*range(1, x.ndim), 0)
    back = [order.index(i) for i in range(x.ndim)]
    return x if x.ndim < 2 else x.permute(order).contiguous().permute(back)


def assert_near(found: Tensor, expected: Tensor, dtype: torch.dtype, ulps: float = 1) -> None:
    """Relative to the element and to the mean magnitude, which is what cancelling summands are rounded at."""
    expected = expected.to(found.device)
    error = (found.double() - expected).abs()
    assert (error <= ulps * TOLERANCE[dtype] * (expected.abs() + expected.abs().mean())).all(), error.max()


def _spread(scalar: Tensor, like: Tensor) -> Tensor:
    return scalar.view(-1, *[1] * (like.ndim - 1))


def _row_means(*summands: Tensor | None, like: Tensor) -> Tensor:
    return torch.stack([like.new_zeros(len(like)) if s is None else s.flatten(1).mean(1) for s in summands], 1)


def naive_matching(a: Inputs, beta: float | None = None) -> Tensor:
    """The definition of every column."""
    v, x0 = a["v"], a["x0"]
    target = a["eps"] - x0 if "eps" in a else (a["x_t"] - x0) / _spread(a["t"], v)
    summands: list[Tensor | None] = [(v - target) ** 2]
    for name in ("v_old", "v_ref", "v_ema"):
        w = a.get(name)
        summands += [None, None] if w is None else [(v - w) ** 2, (v - target) ** 2 - (w - target) ** 2]
    if beta is None:
        return _row_means(*summands, *[None] * 4, like=v)
    plus = (1 - beta) * a["v_old"] + beta * v - target
    minus = (1 + beta) * a["v_old"] - beta * v - target
    return _row_means(*summands, plus**2, minus**2, plus.abs(), minus.abs(), like=v)


def naive_blend(a: Inputs, guidance: float = 1.0, weight: float = 1.0) -> Tensor:
    """Both sides guided, if they have an unconditional branch, then blended."""
    tuned, base = a["v_cond"], a.get("base_cond")
    if "v_uncond" in a:
        tuned = (1 - guidance) * a["v_uncond"] + guidance * tuned
    if base is None:
        return tuned
    if "base_uncond" in a:
        base = (1 - guidance) * a["base_uncond"] + guidance * base
    return (1 - weight) * base + weight * tuned


def _matching(*constant: str, scalars: tuple[str, ...] = (), beta: float | None = None) -> OpCase:
    return OpCase(
        lambda a: matching_moments.matching_moments(**a, beta=beta),
        lambda a: naive_matching(a, beta),
        ("v",),
        ("x0", *constant),
        scalars,
        (matching_moments, "_moments"),
    )


def _guidance(*trained: str, constant: tuple[str, ...] = (), g: float = 4.5, weight: float = 1.0) -> OpCase:
    return OpCase(
        lambda a: guidance.guided_velocity(**a, guidance=g, weight=weight),
        lambda a: naive_blend(a, g, weight),
        trained,
        constant,
        (),
        (guidance, "_guidance"),
    )


def _step(call, naive, trained, constant, scalars) -> OpCase:  # type: ignore[no-untyped-def]
    def naively(a: Inputs) -> Tensor:
        return naive(*(_spread(x, a[trained[0]]) if x.ndim == 1 else x for x in a.values()))

    return OpCase(lambda a: call(**a), naively, trained, constant, scalars, (step, "_step"))


CASES = {
    "matching": _matching("eps", "v_old", "v_ref", "v_ema", beta=0.3),
    "matching_at_the_state": _matching("x_t", "v_old", scalars=("t",), beta=1.0),
    "matching_without_branches": _matching("eps", "v_old", "v_ref"),
    "matching_alone": _matching("eps"),
    "guidance": _guidance("v_cond", "v_uncond"),
    "blend": _guidance("v_cond", "v_uncond", constant=("base_cond", "base_uncond"), weight=1.6),
    "blend_of_unguided": _guidance("v_cond", constant=("base_cond",), weight=-0.5),
    "blend_with_a_guided_base": _guidance("v_cond", constant=("base_cond", "base_uncond"), weight=3.0),
    "sde_step": _step(
        lambda **a: step.sde_step(**a)[0],
        lambda x_t, v, noise, A, B, std: A * x_t + B * v + std * noise,
        ("x_t", "v"),
        ("noise",),
        ("A", "B", "std"),
    ),
    "ode_step": _step(step.ode_step, lambda x_t, v, A, B: A * x_t + B * v, ("x_t", "v"), (), ("A", "B")),
    "renoise": _step(step.renoise, lambda x0, eps, t: (1 - t) * x0 + t * eps, ("x0", "eps"), (), ("t",)),
}
