"""Triton bodies of every op against the reference. Not collected by name: `test_triton.py` runs it in its own process.

By hand: `FLOWRL_KERNELS=triton TRITON_INTERPRET=1 pytest tests/kernels/triton_cases.py` on any machine, or without
TRITON_INTERPRET on one with a GPU. Sizes are small and odd; those above 4096 elements a row span several chunks.
"""

import os

import pytest
import torch
from kernel_cases import CASES, COVER, POINT, PRODUCT, TOLERANCE, assert_near, strided
from torch.utils._python_dispatch import TorchDispatchMode

from flowrl_img.kernels import matching_moments_triton, step_triton, transition_triton
from flowrl_img.kernels.guidance import guided_velocity
from flowrl_img.kernels.guidance_torch import guide
from flowrl_img.kernels.matching_moments import GAIN_OLD, MINUS1, MINUS2, PLUS1, PLUS2, matching_moments
from flowrl_img.kernels.matching_moments_torch import Inputs
from flowrl_img.kernels.step import renoise, sde_step
from flowrl_img.kernels.transition import E2, transition_moments

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SOME = ["transition", "transition_unguided", "matching", "matching_at_the_state", "blend", "sde_step"]

every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
some_cases = pytest.mark.parametrize("case", [CASES[name] for name in SOME], ids=SOME)


def assert_bodies_agree(name, shape, v_dtype, x_dtype, wanted, monkeypatch):
    """Triton is demanded: it runs or raises."""
    case, results = CASES[name], []
    for choice in ("triton", "torch"):
        monkeypatch.setenv("FLOWRL_KERNELS", choice)
        results.append(case.differentiate(case.call, case.inputs(shape, v_dtype, x_dtype, DEVICE), wanted))
    (found, gradients), (expected, references) = results
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    # Elementwise arithmetic is the same and sums run in another order. Twice the tolerance of rounding, one ulp,
    # because the interpreter truncates to bfloat16 where hardware rounds.
    if case.op[1] != "_moments" and found.dtype == F32:
        assert torch.equal(found, expected)
    assert_near(found, expected.double(), found.dtype, ulps=2)
    assert gradients.keys() == references.keys()
    for key, gradient in gradients.items():
        assert (gradient.dtype, gradient.shape) == (references[key].dtype, references[key].shape)
        assert_near(gradient, references[key].double(), gradient.dtype, ulps=2)


@pytest.mark.parametrize(POINT, COVER)
def test_bodies_agree(name, shape, v_dtype, x_dtype, wanted, monkeypatch):
    assert_bodies_agree(name, shape, v_dtype, x_dtype, wanted, monkeypatch)


@pytest.mark.full
@pytest.mark.parametrize(POINT, PRODUCT)
def test_bodies_agree_for_every_shape_and_dtype(name, shape, v_dtype, x_dtype, wanted, monkeypatch):
    assert_bodies_agree(name, shape, v_dtype, x_dtype, wanted, monkeypatch)


def test_the_backward_pass_is_the_triton_body_too(monkeypatch):
    calls, original = [], transition_triton.backward
    monkeypatch.setattr(transition_triton, "backward", lambda *a: (calls.append(1), original(*a))[1])
    for choice, expected in (("triton", 1), ("torch", 1)):
        monkeypatch.setenv("FLOWRL_KERNELS", choice)
        case = CASES["transition"]
        case.differentiate(case.call, case.inputs((2, 3, 4), F32, F32, DEVICE))
        assert len(calls) == expected


@some_cases
def test_strides_batches_and_repetition_change_no_bit(case, monkeypatch):
    monkeypatch.setenv("FLOWRL_KERNELS", "triton")
    inputs = case.inputs((3, 5, 10, 90), F32, F32, DEVICE)
    whole, gradients = case.differentiate(case.call, inputs)
    for changed in (inputs, {name: strided(x) for name, x in inputs.items()}):
        again, found = case.differentiate(case.call, changed)
        assert torch.equal(again, whole)
        assert all(torch.equal(found[name], gradients[name]) for name in gradients)
    assert torch.equal(case.call({name: x[1:2] for name, x in inputs.items()}), whole[1:2])


@every_case
def test_no_rows_give_no_results(case, monkeypatch):
    monkeypatch.setenv("FLOWRL_KERNELS", "triton")
    out, gradients = case.differentiate(case.call, case.inputs((0, 4, 8), F32, F32, DEVICE))
    assert len(out) == 0
    assert all(gradient.shape == (0, 4, 8) for gradient in gradients.values())


def test_guidance_is_scorings_own_to_the_bit(monkeypatch):
    monkeypatch.setenv("FLOWRL_KERNELS", "triton")
    c, u, x, z = torch.randn(4, 2, 4, 33, 17, generator=torch.Generator().manual_seed(0)).to(DEVICE, BF16)
    v, one = guided_velocity(c, u, 4.5), torch.ones(2, device=DEVICE)
    assert torch.equal(v, guide(c, u, 4.5))
    assert not transition_moments(c, u, 4.5, x, z, one, one, v_old=v)[:, E2 + 1 :].any()


def test_a_steps_error_is_the_one_that_scoring_finds_to_the_bit(monkeypatch):
    monkeypatch.setenv("FLOWRL_KERNELS", "triton")
    x_t, v, z = torch.randn(3, 2, 5, 1700, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    A, B, std = torch.rand(3, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for dtype in (F32, BF16):
        x_s, error = sde_step(x_t, v, z, A, B, std, dtype=dtype)
        assert torch.equal(error, transition_moments(v, None, 1.0, x_t, x_s, A, B)[:, E2])


def test_equal_policies_have_equal_branches_and_no_gain_to_the_bit(monkeypatch):
    monkeypatch.setenv("FLOWRL_KERNELS", "triton")
    v, x0, eps = torch.randn(3, 2, 5, 1700, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    M = matching_moments(v, x0, eps, v_old=v, beta=0.1)
    assert not M[:, GAIN_OLD].any()
    assert torch.equal(M[:, PLUS2], M[:, MINUS2])
    assert torch.equal(M[:, PLUS1], M[:, MINUS1])


class Allocations(TorchDispatchMode):
    """Bytes that operations return in new storage; views of what was there are free."""

    def __init__(self):
        super().__init__()
        self.seen, self.bytes = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        known = {x.untyped_storage().data_ptr() for x in (*args, *self.seen) if isinstance(x, torch.Tensor)}
        if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in known:
            self.seen.append(out)  # kept alive, so that no address is used twice
            self.bytes += out.untyped_storage().nbytes()
        return out


@pytest.mark.parametrize("dtype", TOLERANCE.keys() - {torch.float64}, ids=str)
def test_contiguous_inputs_are_neither_copied_nor_widened_in_memory(dtype):
    R, D = 2, 3 * 4096 + 5
    v, x0, eps, old = torch.randn(4, R, D, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    row, grad = torch.rand(R, device=DEVICE), torch.ones(R, 11, device=DEVICE)
    given = Inputs(v, x0, eps, v_old=old, beta=0.1)
    counted = {
        "matching": (lambda: matching_moments_triton.forward(given), 4 * R * 11 * 5),
        "matching backward": (
            lambda: matching_moments_triton.backward(grad, given),
            v.nbytes,
        ),
        "step": (lambda: step_triton.forward(v, row, x0, row, eps, row, dtype, True), v.nbytes + 4 * R * 5),
    }
    for name, (run, allowed) in counted.items():
        with Allocations() as meter:
            run()
        assert meter.bytes == allowed, name


def test_renoising_rounds_as_the_reference_does(monkeypatch):
    x0, eps = torch.randn(2, 2, 5, 900, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    t, results = torch.tensor([0.3, 0.97], dtype=torch.float64), []
    for choice in ("triton", "torch"):
        monkeypatch.setenv("FLOWRL_KERNELS", choice)
        results.append(renoise(x0, eps, t, dtype=F16))
    assert torch.equal(*results)
