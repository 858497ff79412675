"""Steps: the arithmetic of the sampling loop to the bit, measured at the state as stored."""

import pytest
import torch

from flowrl_img.kernels.logprob import log_prob
from flowrl_img.kernels.step import ode_step, renoise, sde_step
from flowrl_img.kernels.transition import E2, transition_moments
from flowrl_img.samplers.loop import sample
from flowrl_img.samplers.schedules import flow_match_sigmas
from flowrl_img.samplers.steps.flow_sde import FlowSDE
from flowrl_img.samplers.steps.ode import ODE

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64


@pytest.fixture(autouse=True)
def _reference_body(monkeypatch):
    monkeypatch.setenv("FLOWRL_KERNELS", "torch")


def latents(n, shape=(3, 4, 9, 7), dtype=F32):
    return torch.randn(n, *shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("v_dtype", [F32, BF16])
@pytest.mark.parametrize("dtype", [F32, F64])
def test_a_walk_of_these_steps_is_plain_arithmetic_to_the_bit(dtype, v_dtype):
    sigmas, rule = flow_match_sigmas(6), FlowSDE(0.7)
    x, *draws = latents(7).to(dtype)
    chosen = (1, 2, 4)

    def velocity(x, i, sigma):
        return torch.sin(3 * x + i).to(v_dtype)

    trajectory = sample(velocity, x, sigmas, rule, chosen, lambda i: draws[i], keep=chosen)
    random, calm = rule.coefficients(sigmas), ODE().coefficients(sigmas)
    for i in range(6):
        v, table = velocity(x, i, None), random if i in chosen else calm
        x = float(table.A[i]) * x + float(table.B[i]) * v.to(dtype)
        if i in chosen:
            mean, x = x, x + float(table.std[i]) * draws[i]
            assert torch.equal(x, trajectory.kept[i].x_s)
            torch.testing.assert_close(trajectory.kept[i].e2, (x - mean).square().mean((1, 2, 3)))
    assert torch.equal(x, trajectory.x0)


def test_the_error_of_a_kept_step_is_the_one_that_scoring_finds_to_the_bit():
    sigmas, (x, *draws) = flow_match_sigmas(6), latents(7)
    kept = sample(
        lambda x, i, s: torch.sin(3 * x + i), x, sigmas, FlowSDE(0.7), (1, 4), lambda i: draws[i], (1, 4)
    ).kept
    for i, step in kept.items():
        row = FlowSDE(0.7).coefficients(sigmas).rows(torch.full((3,), i))
        assert torch.equal(step.e2, transition_moments(step.v, None, 1.0, step.x_t, step.x_s, row.A, row.B)[:, E2])


@pytest.mark.parametrize("dtype", [F32, BF16, torch.float16])
def test_the_error_is_that_of_the_state_as_stored_and_as_scoring_finds_it(dtype):
    x_t, v, z = latents(3)
    A, B, std = (torch.tensor(c, dtype=F64) for c in ([0.9, 0.8, 1.0], [-0.1, -0.2, -0.3], [0.5, 0.3, 0.0063]))
    x_s, error = sde_step(x_t, v, z, A, B, std, dtype=dtype)
    assert x_s.dtype == dtype
    found = transition_moments(v, None, 1.0, x_t, x_s, A, B)[:, E2]
    assert torch.equal(error, found)
    assert log_prob(error, std).isfinite().all()
    if dtype != F32:  # rounding is not noise that was drawn: the stored state is off by more than float32 shows
        drawn = (std * (z.double() ** 2).flatten(1).mean(1).sqrt()) ** 2
        assert (error - drawn).abs().max() > 1e-6


def test_a_step_without_noise_in_float32_leaves_no_error():
    x_t, v, z = latents(3)
    A, B = torch.ones(3), -torch.full((3,), 0.1)
    x_s, error = sde_step(x_t, v, z, A, B, torch.zeros(3))
    assert not error.any()
    assert torch.equal(x_s, ode_step(x_t, v, A, B))


def test_the_error_is_a_constant_of_the_velocity():
    x_t, v, z = latents(3)
    x_s, error = sde_step(x_t, v.requires_grad_(), z, *torch.full((3, 3), 0.5))
    assert x_s.requires_grad
    assert not error.requires_grad


def test_renoising_ends_at_the_data_and_at_the_noise_exactly():
    x0, eps = latents(2)
    x_t = renoise(x0, eps, torch.tensor([0.0, 1.0, 0.25], dtype=F64))
    assert torch.equal(x_t[0], x0[0])
    assert torch.equal(x_t[1], eps[1])
    torch.testing.assert_close(x_t[2], 0.75 * x0[2] + 0.25 * eps[2], rtol=0, atol=0)


def test_states_are_rounded_once_to_the_dtype_asked_for():
    x0, eps = latents(2)
    t = torch.tensor([0.1, 0.5, 0.9], dtype=F64)
    assert renoise(x0.to(BF16), eps, t).dtype == BF16
    assert torch.equal(renoise(x0, eps, t, dtype=BF16), renoise(x0, eps, t).to(BF16))
