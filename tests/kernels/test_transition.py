"""The transition moments beside what `test_every_op.py` asks of all ops: branches, exact zeros, wrong arguments."""

import pytest
import torch
from kernel_cases import CASES

from flowrl_img.kernels.guidance_torch import guide
from flowrl_img.kernels.transition import CROSS, DOLD2, DREF2, E2, transition_moments

CASE = CASES["transition"]
GUIDANCE = 4.5


@pytest.fixture(autouse=True)
def _reference_body(monkeypatch):
    monkeypatch.setenv("FLOWRL_KERNELS", "torch")


def test_a_detached_unconditional_branch_gets_no_gradient_and_changes_no_value():
    case = CASE.inputs((2, 3, 4, 4))
    cond, uncond = case["v_cond"].requires_grad_(), case["v_uncond"].requires_grad_()
    arguments = (GUIDANCE, case["x_t"], case["x_s"], case["A"], case["B"])
    full = transition_moments(cond, uncond, *arguments, v_old=case["v_old"])
    (expected,) = torch.autograd.grad(full.sum(), cond, retain_graph=True)
    detached = transition_moments(cond, uncond, *arguments, v_old=case["v_old"], detach_uncond=True)
    detached.sum().backward()
    assert torch.equal(full, detached)
    assert torch.equal(cond.grad, expected)
    assert uncond.grad is None


def test_reshaping_the_latent_changes_nothing():
    shapes = ((2, 4, 8, 8), (2, 64, 4), (2, 4, 4, 4, 4))
    case = CASE.inputs(shapes[0], torch.float32, torch.float32)
    results = [CASE.call({k: x.reshape(shape) if x.ndim > 1 else x for k, x in case.items()}) for shape in shapes]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_a_broadcast_latent_counts_every_element():
    case = CASE.inputs((3, 4, 5))
    case["x_t"] = case["x_t"][:1].expand(3, 4, 5)
    torch.testing.assert_close(CASE.call(case), CASE.naive(case), rtol=1e-12, atol=1e-14)


def test_equal_velocities_leave_exact_zeros():
    case = CASE.inputs((3, 4, 8, 8), torch.bfloat16, torch.float32)
    case["v_old"] = guide(case["v_cond"], case["v_uncond"], GUIDANCE)
    case["v_ref"] = case["v_old"].clone()
    moments = CASE.call(case)
    assert not moments[:, [DREF2, DOLD2, CROSS]].any()
    assert moments[:, E2].all()


@pytest.mark.parametrize("column", [E2, DREF2, DOLD2, CROSS])
def test_every_column_passes_gradcheck(column):
    case = CASE.inputs((2, 3, 2, 2))
    leaves = [case[name].requires_grad_() for name in CASE.trained]
    assert torch.autograd.gradcheck(lambda c, u: CASE.call(case | {"v_cond": c, "v_uncond": u})[:, column], leaves)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_s": torch.zeros(2, 3, 5)}, "x_s is"),
        ({"v_old": torch.zeros(1, 3, 4)}, "v_old is"),
        ({"v_ref": torch.zeros(2, 3, 4, device="meta")}, "v_ref is"),
        ({"A": torch.zeros(3)}, "A must be one number per row"),
        ({"B": torch.zeros(2, 1)}, "B must be one number per row"),
        ({"v_ref": torch.zeros(2, 3, 4, requires_grad=True)}, r"pass v_ref.detach\(\)"),
        ({"v_cond": torch.zeros(2)}, "latents must be"),
        ({"v_cond": torch.zeros(2, 0)}, "latents must be"),
    ],
)
def test_wrong_arguments_are_refused_with_the_fix(changes, message):
    with pytest.raises(ValueError, match=message):
        CASE.call(CASE.inputs((2, 3, 4)) | changes)
