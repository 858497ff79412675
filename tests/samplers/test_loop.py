"""The loop does the arithmetic of its table, calls its functions by step index, and keeps what it was told to keep."""

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from flowrl_img.kernels.logprob import log_prob
from flowrl_img.kernels.transition import E2, transition_moments
from flowrl_img.samplers.loop import sample
from flowrl_img.samplers.schedules import flow_match_sigmas
from flowrl_img.samplers.steps.flow_sde import FlowSDE
from flowrl_img.samplers.steps.ode import ODE

SHAPE = (3, 4, 5, 6)
SIGMAS = flow_match_sigmas(6)


def normal(key, shape=SHAPE):
    return torch.randn(shape, generator=torch.Generator().manual_seed(key))


def velocity(x, i, sigma):
    """Nonlinear, and different at every step, so that a wrong index or state shows."""
    return torch.tanh(x) * (1 + i) / 4 - sigma


def roll(**changes):
    arguments = {
        "velocity": velocity,
        "x_1": normal(0),
        "sigmas": SIGMAS,
        "step_rule": FlowSDE(0.7),
        "stochastic_steps": (1, 2, 4),
        "noise": lambda i: normal(100 + i),
        "keep": (1, 2, 4),
    }
    return sample(**(arguments | changes))


def test_without_stochastic_steps_it_is_the_euler_sampler_of_diffusers():
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(6)
    x = normal(0)
    for i, timestep in enumerate(scheduler.timesteps):
        x = scheduler.step(velocity(x, i, scheduler.sigmas[i].item()), timestep, x).prev_sample
    trajectory = roll(stochastic_steps=(), keep=())
    torch.testing.assert_close(trajectory.x0, x, rtol=0, atol=1e-6)
    assert not trajectory.kept


def test_zero_noise_level_is_the_euler_sampler():
    stochastic = roll(step_rule=FlowSDE(0.0), stochastic_steps=range(6), keep=())
    torch.testing.assert_close(stochastic.x0, roll(stochastic_steps=(), keep=()).x0, rtol=0, atol=1e-6)


def test_velocity_and_noise_are_called_with_their_step():
    calls, draws = [], []
    roll(
        velocity=lambda x, i, sigma: (calls.append((i, sigma)), velocity(x, i, sigma))[1],
        noise=lambda i: (draws.append(i), normal(i))[1],
    )
    assert calls == list(enumerate(SIGMAS[:-1].tolist()))
    assert draws == [1, 2, 4]


def test_only_the_named_steps_are_kept():
    assert set(roll(keep=(2,)).kept) == {2}


def test_a_kept_successor_is_the_very_state_the_next_step_starts_from():
    states = {}
    trajectory = roll(velocity=lambda x, i, sigma: (states.update({i: x}), velocity(x, i, sigma))[1])
    for i, kept in trajectory.kept.items():
        assert kept.x_t is states[i]
        assert kept.x_s is states[i + 1]


def test_the_last_kept_successor_is_the_result():
    trajectory = roll(stochastic_steps=(5,), keep=(5,))
    assert trajectory.kept[5].x_s is trajectory.x0


def test_the_log_prob_of_a_kept_step_is_that_of_the_noise_that_drew_it():
    table = FlowSDE(0.7).coefficients(SIGMAS)
    for i, kept in roll().kept.items():
        row = table.rows(torch.tensor([i] * 3))
        moments = transition_moments(kept.v, None, 1.0, kept.x_t, kept.x_s, row.A, row.B)
        z = normal(100 + i).double()
        expected = torch.distributions.Normal(0.0, row.std[0]).log_prob(row.std[0] * z).mean((1, 2, 3))
        # x_s is rounded to float32: relative error 6e-8 of |x_s| ~ 2 over std ~ .3 is 4e-7 in a unit residual
        torch.testing.assert_close(log_prob(moments[:, E2], row.std).double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("step", [0, 3, 5])
def test_the_drawn_noise_has_the_std_that_scores_it(step):
    table = FlowSDE(0.7).coefficients(SIGMAS)
    x_1 = normal(1, (50_000, 1))
    kept = roll(x_1=x_1, stochastic_steps=(step,), keep=(step,), noise=lambda i: normal(2, x_1.shape)).kept[step]
    residual = kept.x_s.double() - table.A[step] * kept.x_t.double() - table.B[step] * kept.v.double()
    # 50k draws: the relative standard error of a std is 1 / sqrt(2 * 50k) = .3 %
    assert residual.std().item() == pytest.approx(table.std[step].item(), rel=0.02)
    assert residual.mean().item() == pytest.approx(0.0, abs=0.02 * table.std[step].item())


def test_a_low_precision_velocity_is_kept_as_it_came_and_used_in_float32():
    kept = roll(velocity=lambda x, i, sigma: velocity(x, i, sigma).bfloat16()).kept[2]
    table = FlowSDE(0.7).coefficients(SIGMAS)
    assert kept.v.dtype == torch.bfloat16
    assert kept.x_s.dtype == torch.float32
    again = float(table.A[2]) * kept.x_t + float(table.B[2]) * kept.v.float() + float(table.std[2]) * normal(102)
    torch.testing.assert_close(kept.x_s, again, rtol=0, atol=1e-6)


def test_nothing_that_is_kept_holds_a_graph():
    weight = torch.ones((), requires_grad=True)
    trajectory = roll(velocity=lambda x, i, sigma: weight * velocity(x, i, sigma))
    assert not trajectory.x0.requires_grad
    assert not any(kept.v.requires_grad or kept.x_s.requires_grad for kept in trajectory.kept.values())


def test_a_sample_does_not_depend_on_its_batch_mates():
    whole = roll().x0
    alone = roll(x_1=normal(0)[1:2], noise=lambda i: normal(100 + i)[1:2]).x0
    assert torch.equal(whole[1:2], alone)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keep": (0,)}, "not stochastic"),
        ({"stochastic_steps": (6,), "keep": ()}, "outside a grid of 6"),
        ({"step_rule": FlowSDE(0.0)}, "std is 0"),
        ({"step_rule": ODE()}, "std is 0"),
        ({"x_1": normal(0).bfloat16()}, "float32"),
        ({"velocity": lambda x, i, sigma: x[:1]}, "velocity at step 0"),
        ({"noise": lambda i: torch.zeros(())}, "noise of step 1"),
        ({"sigmas": SIGMAS.flip(0)}, "fall strictly"),
        ({"sigmas": SIGMAS * 1000}, "fall strictly"),
    ],
)
def test_wrong_arguments_are_refused_with_a_reason(changes, message):
    with pytest.raises(ValueError, match=message):
        roll(**changes)
