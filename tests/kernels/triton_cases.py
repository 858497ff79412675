"""Triton bodies against the reference. Not collected by name: `test_triton.py` runs it in a process of its own.

By hand: `FLOWRL_KERNELS=triton TRITON_INTERPRET=1 pytest tests/kernels/triton_cases.py` on any machine, or without
TRITON_INTERPRET on one with a GPU. Sizes are small and odd; those above 4096 elements a row span several chunks.
"""

import os

import pytest
import torch

from flowrl_img.kernels import transition_torch as reference
from flowrl_img.kernels import transition_triton as fused
from flowrl_img.kernels.guidance_torch import guide
from flowrl_img.kernels.transition import transition_moments
from flowrl_img.kernels.transition_torch import DOLD2

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
SHAPES = [(2, 4, 8, 8), (3, 7, 5), (2, 3, 2, 5, 3), (1, 1), (2, 67, 65), (1, 4096), (1, 3 * 4096 + 1)]
EPS = {torch.float32: 2**-23, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def arguments(shape, v_dtype=torch.float32, x_dtype=torch.float32, absent=()):
    """Arguments of `forward`: v_cond, v_uncond, guidance, x_t, x_s, A, B, v_old, v_ref."""
    stream = torch.Generator().manual_seed(0)
    names = ("v_cond", "v_uncond", "x_t", "x_s", "v_old", "v_ref")
    latents = {k: torch.randn(shape, generator=stream).to(x_dtype if k[0] == "x" else v_dtype) for k in names}
    A, B = torch.rand(shape[0], generator=stream), -torch.rand(shape[0], generator=stream)
    c, u, x_t, x_s, old, ref = (None if k in absent else x.to(DEVICE) for k, x in latents.items())
    return c, u, 4.5, x_t, x_s, A.to(DEVICE), B.to(DEVICE), old, ref


def assert_bodies_agree(a):
    # Equal elementwise arithmetic; sums of n terms in another order differ by about log2(n) * 6e-8 of sum |term|.
    torch.testing.assert_close(fused.forward(*a), reference.forward(*a), rtol=2e-6, atol=2e-6)
    grad = torch.randn(len(a[0]), 4, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    for into_uncond in {False, a[1] is not None}:
        for found, expected in zip(
            fused.backward(grad, *a, into_uncond), reference.backward(grad, *a, into_uncond), strict=True
        ):
            assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
            if found.numel():
                scale = expected.float().abs().mean().item()
                torch.testing.assert_close(
                    found.float(), expected.float(), rtol=4 * EPS[found.dtype], atol=1e-5 * scale
                )


@pytest.mark.parametrize("shape", SHAPES)
def test_bodies_agree_for_odd_shapes(shape):
    assert_bodies_agree(arguments(shape))


@pytest.mark.parametrize("v_dtype", EPS)
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
def test_bodies_agree_for_every_mix_of_dtypes(v_dtype, x_dtype):
    assert_bodies_agree(arguments((2, 4, 9, 7), v_dtype, x_dtype))


@pytest.mark.parametrize("absent", [("v_uncond",), ("v_old",), ("v_ref",), ("v_uncond", "v_old", "v_ref")])
def test_bodies_agree_when_inputs_are_absent(absent):
    assert_bodies_agree(arguments((2, 5, 9), absent=absent))


def test_strides_change_nothing():
    c, u, g, x_t, x_s, A, B, old, ref = arguments((2, 6, 5, 4))
    strided = [x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0) for x in (c, u, x_t, x_s, old, ref)]
    c2, u2, x_t2, x_s2, old2, ref2 = strided
    plain = fused.forward(c, u, g, x_t, x_s, A, B, old, ref)
    assert not c2.is_contiguous()
    assert torch.equal(fused.forward(c2, u2, g, x_t2, x_s2, A, B, old2, ref2), plain)


def test_runs_are_bitwise_equal_and_rows_do_not_depend_on_their_batch():
    a = arguments((3, 2, 2500))
    whole = fused.forward(*a)
    assert torch.equal(fused.forward(*a), whole)
    row = tuple(x[1:2] if isinstance(x, torch.Tensor) else x for x in a)
    assert torch.equal(fused.forward(*row), whole[1:2])


def test_guidance_rounds_as_the_reference_does_so_that_equal_policies_have_ratio_one():
    c, u, g, x_t, x_s, A, B, _, ref = arguments((2, 4, 33, 17), torch.bfloat16)
    old = guide(c, u, g)
    moments = fused.forward(c, u, g, x_t, x_s, A, B, old, ref)
    assert not moments[:, DOLD2:].any()
    assert moments[:, :DOLD2].all()


def test_no_rows_give_no_moments():
    a = arguments((0, 4, 8))
    assert fused.forward(*a).shape == (0, 4)
    assert fused.backward(torch.zeros(0, 4, device=DEVICE), *a, True)[1].shape == (0, 4, 8)


def test_the_public_op_dispatches_here_and_differentiates(monkeypatch):
    c, u, g, x_t, x_s, A, B, old, ref = arguments((2, 5, 9))
    gradients = []
    for choice in ("triton", "torch"):
        monkeypatch.setenv("FLOWRL_KERNELS", choice)
        calls = []
        monkeypatch.setattr(
            fused, "backward", lambda *a, body=fused.backward, calls=calls: (calls.append(1), body(*a))[1]
        )
        leaves = [c.clone().requires_grad_(), u.clone().requires_grad_()]
        moments = transition_moments(*leaves, g, x_t, x_s, A, B, v_old=old, v_ref=ref)
        (moments * torch.arange(1.0, 5.0, device=DEVICE)).sum().backward()
        assert len(calls) == (choice == "triton")
        gradients.append([leaf.grad for leaf in leaves])
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)
