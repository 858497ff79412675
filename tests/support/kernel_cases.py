"""Every fused op as cases of one form: how to call it, its definition, what gets a gradient.

What is asked of all alike is in tests/kernels/test_every_op.py, and of the Triton bodies in triton_cases.py. `COVER`
holds every pair of case, shape, dtypes and wanted gradient in few points, `PRODUCT` every combination.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowrl_img.kernels import guidance, matching_moments, step, transition

# [B, C, H, W]; [B, L, C]; 5-D; one element; a whole chunk of 4096; a bit less; two chunks and one element.
SHAPES = [(2, 4, 8, 8), (3, 7, 5), (2, 3, 2, 5, 3), (1, 1), (1, 4096), (2, 4 * 33, 31), (1, 2 * 4096 + 1)]
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
    steady: Callable[[Inputs], Tensor] = lambda a: torch.ones(())
    """1 where the gradient is continuous, from float64 inputs; 0 where rounding may turn a sign in it."""

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

    def differentiate(
        self, f: Callable[[Inputs], Tensor], inputs: Inputs, wanted: str = "all"
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """f and gradients of a fixed weighting of it, by name of the trained input: "all", the "first", the "last"."""
        names = {"all": self.trained, "first": self.trained[:1], "last": self.trained[-1:]}[wanted]
        leaves = {name: inputs[name].detach().clone().requires_grad_() for name in names}
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


def naive_transition(a: Inputs, guidance: float = 1.0) -> Tensor:
    """The definition of every column."""
    v, A, B = a["v_cond"], _spread(a["A"], a["x_t"]), _spread(a["B"], a["x_t"])
    if "v_uncond" in a:
        v = (1 - guidance) * a["v_uncond"] + guidance * v
    summands: list[Tensor | None] = [(a["x_s"] - A * a["x_t"] - B * v) ** 2, None, None, None]
    if "v_ref" in a:
        summands[transition.DREF2] = (v - a["v_ref"]) ** 2
    if "v_old" in a:
        summands[transition.DOLD2] = (v - a["v_old"]) ** 2
        summands[transition.CROSS] = (v - a["v_old"]) * (a["x_s"] - A * a["x_t"] - B * a["v_old"])
    return _row_means(*summands, like=v)


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
    plus, minus = _branches(a, beta)
    return _row_means(*summands, plus**2, minus**2, plus.abs(), minus.abs(), like=v)


def _branches(a: Inputs, beta: float) -> tuple[Tensor, Tensor]:
    """The errors of the plus and the minus branch."""
    target = a["eps"] - a["x0"] if "eps" in a else (a["x_t"] - a["x0"]) / _spread(a["t"], a["v"])
    return (1 - beta) * a["v_old"] + beta * a["v"] - target, (1 + beta) * a["v_old"] - beta * a["v"] - target


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


def _transition(*trained: str, constant: tuple[str, ...] = (), g: float = 4.5) -> OpCase:
    return OpCase(
        lambda a: transition.transition_moments(**({"v_uncond": None} | a), guidance=g),
        lambda a: naive_transition(a, g),
        trained,
        ("x_t", "x_s", *constant),
        ("A", "B"),
        (transition, "_moments"),
    )


def _matching(*constant: str, scalars: tuple[str, ...] = (), beta: float | None = None) -> OpCase:
    return OpCase(
        lambda a: matching_moments.matching_moments(**a, beta=beta),
        lambda a: naive_matching(a, beta),
        ("v",),
        ("x0", *constant),
        scalars,
        (matching_moments, "_moments"),
        *([] if beta is None else [lambda a: torch.stack(_branches(a, beta)).abs().amin(0) > 1e-5]),
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
    "transition": _transition("v_cond", "v_uncond", constant=("v_old", "v_ref")),
    "transition_unguided": _transition("v_cond", constant=("v_old",)),
    "transition_of_the_reference": _transition("v_cond", "v_uncond", constant=("v_ref",), g=1.0),
    "transition_alone": _transition("v_cond"),
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


def pairwise(*factors: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Few combinations of one value per factor, always the same, in which every two values of two factors meet."""
    sides = list(itertools.combinations(range(len(factors)), 2))
    open_pairs = {(i, a, j, b) for i, j in sides for a in range(len(factors[i])) for b in range(len(factors[j]))}

    def closes(row: dict[int, int]) -> set[tuple[int, int, int, int]]:
        return {(i, row[i], j, row[j]) for i, j in sides if i in row and j in row} & open_pairs

    found = []
    while open_pairs:
        i, a, j, b = min(open_pairs)
        row = {i: a, j: b}
        for k in set(range(len(factors))) - {i, j}:
            row[k] = max(range(len(factors[k])), key=lambda value, k=k: (len(closes(row | {k: value})), -value))
        open_pairs -= closes(row)
        found.append(tuple(factor[row[k]] for k, factor in enumerate(factors)))
    return found


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WANTED = ("all", "first", "last")
POINT = ("name", "shape", "v_dtype", "x_dtype", "wanted")
COVER = pairwise(list(CASES), SHAPES, DTYPES, DTYPES, WANTED)
PRODUCT = [
    (name, *rest, wanted)
    for name, *rest in itertools.product(CASES, SHAPES, DTYPES, DTYPES)
    for wanted in (WANTED if len(CASES[name].trained) > 1 else WANTED[:1])
]
