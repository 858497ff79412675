"""Solvers against diffusers, against stored trajectories, and against the exact flow of a Gaussian target."""

import math

import pytest
import torch
from diffusers import (
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchHeunDiscreteScheduler,
    SASolverScheduler,
)
from gaussian_target import C, M, exact_state, exact_velocity, line

from flowrl_img.samplers.schedules import dpm_flow_sigmas, flow_match_sigmas
from flowrl_img.samplers.solve import solve
from flowrl_img.samplers.solvers.dpm2 import DPM2
from flowrl_img.samplers.solvers.dpm2_published import DPM2Published
from flowrl_img.samplers.solvers.euler import Euler
from flowrl_img.samplers.solvers.heun import Heun
from flowrl_img.samplers.solvers.sa import SASolver

SHAPE = (2, 3, 4, 4)


def normal(key, dtype=torch.float32):
    return torch.randn(SHAPE, dtype=dtype, generator=torch.Generator().manual_seed(key))


def velocity(x, i, sigma):
    """Nonlinear in the state and the level, so that a wrong state, level or weight shows."""
    return torch.tanh(x) * (0.3 + sigma) - sigma


# --- diffusers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_steps", [1, 4, 20])
def test_euler_equals_diffusers(num_steps):
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(num_steps)
    x = normal(0)
    for i, timestep in enumerate(scheduler.timesteps):
        x = scheduler.step(velocity(x, i, scheduler.sigmas[i].item()), timestep, x).prev_sample
    ours = solve(velocity, normal(0), flow_match_sigmas(num_steps), Euler())
    torch.testing.assert_close(ours, x, rtol=0, atol=2e-6)


@pytest.mark.parametrize("num_steps", [1, 5, 20])
def test_heun_equals_diffusers(num_steps):
    scheduler = FlowMatchHeunDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(num_steps)
    sigmas = torch.cat([scheduler.sigmas[:1], scheduler.sigmas[1::2]]).double()
    x = normal(0)
    scheduler.set_begin_index(0)
    for timestep in scheduler.timesteps:
        x = scheduler.step(velocity(x, 0, timestep.item() / 1000), timestep, x).prev_sample
    torch.testing.assert_close(solve(velocity, normal(0), sigmas, Heun()), x, rtol=0, atol=1e-5)


@pytest.mark.parametrize("num_steps", [1, 2, 5, 10, 20])
@pytest.mark.parametrize("make", [dpm_flow_sigmas, flow_match_sigmas])
def test_published_dpm2_equals_diffusers_on_the_same_levels(make, num_steps):
    scheduler = DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    scheduler.set_timesteps(num_steps)
    sigmas = make(num_steps)
    if make is dpm_flow_sigmas:
        assert torch.equal(sigmas.float(), scheduler.sigmas)
    scheduler.sigmas = sigmas.float()
    scheduler.set_begin_index(0)
    x = normal(0)
    for i, timestep in enumerate(scheduler.timesteps):
        x = scheduler.step(velocity(x, i, float(sigmas[i])), timestep, x).prev_sample
    torch.testing.assert_close(solve(velocity, normal(0), sigmas, DPM2Published()), x, rtol=0, atol=1e-5)


@pytest.mark.parametrize("tau", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("num_steps", [2, 3, 8])
def test_sa_solver_with_published_terms_equals_diffusers_on_the_same_levels(tau, num_steps):
    solver = SASolver(tau, stochastic=(0.3, 0.8), first_order_end=1, few_step_term=True)
    sigmas = line(num_steps, 0.95, 0.05)
    scheduler = SASolverScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, tau_func=lambda t: tau if 300 <= t <= 800 else 0.0
    )
    scheduler.set_timesteps(num_steps)
    scheduler.sigmas = sigmas
    scheduler.set_begin_index(0)
    stream, x = torch.Generator().manual_seed(7), normal(0, torch.float64)
    for i in range(num_steps):
        v = velocity(x, i, float(sigmas[i]))
        x = scheduler.step(v, 1000 * float(sigmas[i]), x, generator=stream).prev_sample
    again = torch.Generator().manual_seed(7)
    draws = [torch.randn(SHAPE, dtype=torch.float64, generator=again) for _ in range(num_steps)]
    ours = solve(velocity, normal(0, torch.float64), sigmas, solver, lambda i: draws[i])
    torch.testing.assert_close(ours, x, rtol=0, atol=1e-9)


# --- stored trajectories -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "solver"),
    [
        ("euler_sd3N10", Euler()),
        ("euler_diffusers_sd3N10", Euler()),
        ("dpm1_sd3N10", DPM2(first_order_end=10)),
        ("dpm2_sd3N10", DPM2Published()),
        ("dpm2_sd3N25", DPM2Published()),
        ("dpm2_flux1024N10_packed", DPM2Published()),
    ],
)
def test_every_state_of_a_trajectory_matches_golden_numbers(golden, name, solver):
    case, states = golden("solvers", name), []
    mean, spread = case["target_mean"], case["target_std"]

    def target_velocity(x, i, t):
        states.append(x)
        wide = x.double()
        pull = (t - (1 - t) * spread**2) / ((1 - t) ** 2 * spread**2 + t**2)
        return (pull * (wide - (1 - t) * mean) - mean).float()

    x0 = solve(target_velocity, case["x_init"], case["sigmas"], solver)
    case.check("x0_final", x0)
    case.check("trajectory", torch.stack([*states, x0]))


# --- the exact flow ------------------------------------------------------------------------------------------------

START = torch.tensor([-1.0, 0.5, 2.0], dtype=torch.float64)


def error(solver, sigmas):
    reached = solve(exact_velocity, START, sigmas, solver)
    return (reached - exact_state(START, float(sigmas[0]), float(sigmas[-1]))).abs().max().item()


@pytest.mark.parametrize(
    ("solver", "order"),
    [
        (Euler(), 1),
        (Heun(), 2),
        (DPM2(), 2),
        (DPM2Published(), 2),
        (SASolver(0.0), 2),
        (SASolver(0.0, first_order_end=1, few_step_term=True), 2),
    ],
    ids=lambda value: str(value),
)
def test_the_error_falls_at_the_order_of_the_solver(solver, order):
    coarse, fine = (error(solver, line(n, 0.9, 0.3)) for n in (80, 160))
    assert math.log2(coarse / fine) == pytest.approx(order, abs=0.03)


@pytest.mark.parametrize("num_steps", [10, 14, 25])
@pytest.mark.parametrize(
    ("safe", "published"), [(DPM2(), DPM2Published()), (SASolver(0.0), SASolver(0.0, first_order_end=1))]
)
def test_on_the_sd3_grid_a_second_order_step_before_the_last_is_worse_than_euler(safe, published, num_steps):
    sigmas = flow_match_sigmas(num_steps)
    assert error(safe, sigmas) < error(Euler(), sigmas) < error(published, sigmas)


def test_dpm2_is_first_order_where_it_has_to_be():
    published = DPM2Published().coefficients(flow_match_sigmas(10)).predictor[:, 1]
    assert [i for i in range(10) if published[i] == 0] == [0, 1, 9]
    safe = DPM2().coefficients(flow_match_sigmas(10)).predictor[:, 1]
    assert [i for i in range(10) if safe[i] == 0] == [0, 1, 8, 9]
    assert torch.equal(safe[:8], published[:8])
    # the factor named in the docstring: h / (2 h_0) at step 8
    weight = 1 - flow_match_sigmas(10)[9] / flow_match_sigmas(10)[8]
    assert (-published[8] / weight).item() == pytest.approx(2.3, abs=0.05)


@pytest.mark.parametrize(("noise_level", "stochastic"), [(0.4, (0.3, 0.9)), (1.0, (0.0, 1.0))])
def test_the_stochastic_solver_keeps_the_law_of_the_target(noise_level, stochastic):
    n, stream = 20_000, torch.Generator().manual_seed(0)

    def draw(i=0):
        return torch.randn(n, 1, dtype=torch.float64, generator=stream)

    x0 = solve(exact_velocity, draw(), flow_match_sigmas(200), SASolver(noise_level, stochastic), draw)
    # 4 standard errors, C / sqrt(n) of the mean and C / sqrt(2 n) of the std, beside the bias of 200 steps, below 1 %
    assert x0.mean().item() == pytest.approx(M, abs=4 * C / math.sqrt(n))
    assert x0.std().item() == pytest.approx(C, abs=4 * C / math.sqrt(2 * n) + 0.01 * C)


def test_noise_is_drawn_for_the_stochastic_levels_alone():
    draws, sigmas = [], flow_match_sigmas(10)
    solve(velocity, normal(0), sigmas, SASolver(0.4), lambda i: (draws.append(i), normal(i))[1])
    assert draws == [i for i in range(10) if 0.3 <= sigmas[i] <= 0.9]
    assert draws == [3, 4, 5, 6, 7]


def test_a_corrected_multistep_solver_calls_the_network_once_a_step():
    calls = []
    for solver, expected in ((SASolver(0.0), 10), (DPM2(), 10), (Heun(), 19)):
        calls.clear()
        solve(lambda x, i, s: (calls.append(i), velocity(x, i, s))[1], normal(0), flow_match_sigmas(10), solver)
        assert len(calls) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_1": normal(0).bfloat16()}, "float32"),
        ({"solver": SASolver(0.4)}, "pass `noise`"),
        ({"solver": SASolver(0.4), "noise": lambda i: torch.zeros(())}, "noise of step 3"),
        ({"velocity": lambda x, i, sigma: x[:1]}, "velocity at step 0"),
        ({"sigmas": flow_match_sigmas(10).flip(0)}, "fall strictly"),
        ({"solver": SASolver(0.0, few_step_term=True)}, "start the grid below 1"),
    ],
)
def test_wrong_arguments_are_refused_with_a_reason(changes, message):
    arguments = {"velocity": velocity, "x_1": normal(0), "sigmas": flow_match_sigmas(10), "solver": Euler()}
    with pytest.raises(ValueError, match=message):
        solve(**(arguments | changes))


@pytest.mark.parametrize(
    "make",
    [
        lambda: DPM2(first_order_end=0),
        lambda: SASolver(-0.1),
        lambda: SASolver(math.nan),
        lambda: SASolver(0.4, stochastic=(0.9, 0.3)),
        lambda: SASolver(0.4, first_order_end=0),
    ],
)
def test_impossible_settings_are_refused(make):
    with pytest.raises(ValueError):
        make()
