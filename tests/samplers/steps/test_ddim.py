"""DDIM on diffusion grids: diffusers' own samplers, golden steps, and grids that cannot be walked."""

import itertools
import math

import pytest
import torch
from diffusers import DDIMScheduler, EulerDiscreteScheduler
from gaussian_target import C, M, exact_output, propagate

from flowrl_img import plugins
from flowrl_img.kernels.logprob import Density
from flowrl_img.kernels.transition import E2, transition_moments
from flowrl_img.samplers.diffusion import (
    diffusion_grid,
    scaled_linear_alphas,
    scheduler_grid,
    sd15_grid,
    sdxl_grid,
)
from flowrl_img.samplers.fork import fork
from flowrl_img.samplers.loop import sample
from flowrl_img.samplers.steps.ddim import DDIM

SD = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}
SD15 = {**SD, "clip_sample": False, "set_alpha_to_one": False}
NAMES = {"epsilon": "epsilon", "v": "v_prediction", "x0": "sample"}
SHAPE = (2, 4, 8, 8)


def normal(key):
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(key))


def network(x, timestep):
    """Nonlinear, and different at every timestep."""
    return torch.tanh(x) * (0.2 + timestep / 1000)


def walk(grid, eta, prediction):
    """All steps, stochastic with eta and deterministic without it."""
    count = len(grid.timesteps)
    return sample(
        lambda x, i, sigma: network(x, int(grid.timesteps[i])),
        normal(0),
        grid.sigmas,
        DDIM(1.0 if eta == 0 else eta, prediction),
        range(count) if eta else (),
        lambda i: normal(100 + i),
    ).x0


def reference(scheduler, num_steps, eta):
    scheduler.set_timesteps(num_steps)
    x = normal(0)
    for i, t in enumerate(scheduler.timesteps):
        noise = normal(100 + i) if eta else None
        x = scheduler.step(network(x, int(t)), t, x, eta=eta, variance_noise=noise).prev_sample
    return x


@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("prediction", NAMES)
def test_sd15_rollouts_equal_those_of_diffusers(prediction, eta):
    scheduler = DDIMScheduler(**SD15, prediction_type=NAMES[prediction])
    expected = reference(scheduler, 10, eta)
    # diffusers takes 1 - alpha_bar in float32, which leaves 4 digits of the smallest; states are of size 1 to 10
    torch.testing.assert_close(walk(sd15_grid(10), eta, prediction), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("prediction", NAMES)
def test_steps_outside_the_window_are_those_of_the_quiet_rule_in_every_loop(prediction):
    scheduler, grid = DDIMScheduler(**SD15, prediction_type=NAMES[prediction]), sd15_grid(6)
    scheduler.set_timesteps(6)
    x = normal(0)
    for i, t in enumerate(scheduler.timesteps):
        x = scheduler.step(network(x, int(t)), t, x, eta=float(i == 2), variance_noise=normal(102)).prev_sample

    def output(x, i, sigma):
        return network(x, int(grid.timesteps[i]))

    rule = DDIM(1.0, prediction)
    walk = sample(output, normal(0), grid.sigmas, rule, (2,), lambda i: normal(100 + i))
    found = fork(
        lambda x, lane, i, sigma: output(x, i, sigma), normal(0), grid.sigmas, rule, (2,), 1,
        lambda i: normal(100 + i).unsqueeze(1),
    )  # fmt: skip
    for x0 in (walk.x0, found.x0[2][:, 0]):
        torch.testing.assert_close(x0, x, rtol=2e-5, atol=2e-5)


@pytest.mark.full
@pytest.mark.parametrize("eta", [0.0, 1.0])
@pytest.mark.parametrize("prediction", NAMES)
def test_fifty_step_sd15_rollouts_equal_those_of_diffusers(prediction, eta):
    expected = reference(DDIMScheduler(**SD15, prediction_type=NAMES[prediction]), 50, eta)
    torch.testing.assert_close(walk(sd15_grid(50), eta, prediction), expected, rtol=1e-4, atol=1e-4)


def test_sdxl_rollouts_equal_those_of_the_euler_scheduler():
    scheduler = EulerDiscreteScheduler(**SD, timestep_spacing="leading")
    scheduler.set_timesteps(12)
    grid = sdxl_grid(12)
    assert torch.equal(grid.timesteps, scheduler.timesteps.long())
    x = normal(0) * scheduler.init_noise_sigma
    for t in scheduler.timesteps:
        x = scheduler.step(network(scheduler.scale_model_input(x, t), float(t)), t, x).prev_sample
    torch.testing.assert_close(walk(grid, 0.0, "epsilon"), x, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("num_steps", [1, 10, 30, 50])
def test_sd_grids_are_those_of_the_schedulers(num_steps):
    ddim, euler = DDIMScheduler(**SD15), EulerDiscreteScheduler(**SD, timestep_spacing="leading")
    for grid, scheduler in ((sd15_grid(num_steps), ddim), (sdxl_grid(num_steps), euler)):
        scheduler.set_timesteps(num_steps)
        assert torch.equal(grid.timesteps, scheduler.timesteps.long())
    levels = euler.sigmas.double()  # sqrt((1 - a) / a)
    torch.testing.assert_close(sdxl_grid(num_steps).sigmas, levels / (1 + levels**2).sqrt(), rtol=1e-5, atol=0)
    assert torch.equal(scaled_linear_alphas(), ddim.alphas_cumprod.double())
    ours, read = sd15_grid(num_steps), scheduler_grid(ddim, num_steps)
    assert torch.equal(ours.sigmas, read.sigmas)
    assert torch.equal(ours.timesteps, read.timesteps)


def test_reading_a_scheduler_leaves_it_untouched():
    scheduler = DDIMScheduler(**SD15)
    scheduler.set_timesteps(7)
    before = scheduler.timesteps.clone()
    scheduler_grid(scheduler, 20)
    assert torch.equal(scheduler.timesteps, before)
    assert scheduler.num_inference_steps == 7


@pytest.mark.parametrize("prediction", ["v", "x0"])
def test_a_zero_terminal_snr_schedule_is_walked_from_pure_noise(prediction):
    scheduler = DDIMScheduler(
        **SD15, rescale_betas_zero_snr=True, timestep_spacing="trailing", prediction_type=NAMES[prediction]
    )
    grid = scheduler_grid(scheduler, 10)
    assert grid.sigmas[0] == 1
    expected = reference(scheduler, 10, 1.0)
    torch.testing.assert_close(walk(grid, 1.0, prediction), expected, rtol=2e-5, atol=2e-5)


def test_a_noise_prediction_at_pure_noise_is_refused():
    with pytest.raises(ValueError, match="flow_ddim"):
        DDIM().coefficients(torch.tensor([1.0, 0.5, 0.0]))


@pytest.mark.parametrize(("spacing", "num_steps"), [("linspace", 10), ("trailing", 30)])
def test_a_spacing_with_gaps_between_steps_is_refused(spacing, num_steps):
    with pytest.raises(ValueError, match="leaves gaps"):
        scheduler_grid(DDIMScheduler(**SD15, timestep_spacing=spacing), num_steps)


@pytest.mark.parametrize("timesteps", [[], [1000, 1], [10, -1], [1, 500]])
def test_timesteps_outside_the_schedule_or_rising_are_refused(timesteps):
    with pytest.raises(ValueError, match=r"timesteps must be|sigmas must fall"):
        diffusion_grid(scaled_linear_alphas(), torch.tensor(timesteps), 1.0)


@pytest.mark.parametrize("num_steps", [0, 1001])
def test_an_impossible_number_of_steps_is_refused(num_steps):
    with pytest.raises(ValueError, match="num_steps"):
        sd15_grid(num_steps)


@pytest.mark.parametrize("prediction", NAMES)
@pytest.mark.parametrize("eta", [0.0, 1.0])
def test_the_law_of_a_gaussian_target_is_kept_whatever_the_network_predicts(prediction, eta):
    """Up to the level of timestep 0, where the grid ends. Its order is 1: .94 at 50 steps, .77 at eta 1."""
    errors = []
    for n in (50, 100, 200):
        sigmas = sd15_grid(n).sigmas
        start, end = ((1 - t**2).sqrt().item() for t in (sigmas[0], sigmas[-1]))
        first = (start * M, start**2 * C**2 + float(sigmas[0]) ** 2)
        mean, variance = propagate(DDIM(eta, prediction).coefficients(sigmas), sigmas, *first, exact_output(prediction))
        assert mean == pytest.approx(end * M, rel=1e-12)
        errors.append(1 - (variance / (end**2 * C**2 + float(sigmas[-1]) ** 2)) ** 0.5)
    assert 0 < errors[-1] < 0.035
    for coarse, fine in itertools.pairwise(errors):
        assert math.log2(coarse / fine) > 0.75


def test_ddpo_steps_match_golden_numbers(golden):
    case = golden("sde_steps", "ddim_eps_N10_eta1")
    levels = torch.cat([case["alpha_bar_t"], case["alpha_bar_prev"][-1:]])
    # the stored alpha_bar are float32 numbers, one table for both ends of a step
    assert torch.equal(levels[1:], case["alpha_bar_prev"])
    table = DDIM(1.0).coefficients((1 - levels).sqrt())
    torch.testing.assert_close((1 - levels).sqrt(), sd15_grid(10).sigmas, rtol=1e-12, atol=0)
    x, out, z, given = (case[k].double() for k in ("x", "model_output", "z", "x_given"))
    found, log_probs, log_probs_given = [], [], []
    for i in range(10):
        row = table.rows(torch.full((2,), i))
        found.append(table.A[i] * x + table.B[i] * out + table.std[i] * z)
        for into, x_s in ((log_probs, found[-1]), (log_probs_given, given)):
            moments = transition_moments(out, None, 1.0, x, x_s, row.A, row.B)
            into.append(Density().log_prob(moments[:, E2], row.std))
    case.check("next", torch.stack(found))
    case.check("logp", torch.stack(log_probs))
    case.check("logp_given", torch.stack(log_probs_given))


def test_ddim_is_named_in_a_recipe_with_its_prediction():
    assert plugins.build("steps", {"name": "ddim", "eta": 0.5, "prediction": "v"}) == DDIM(0.5, "v")
    with pytest.raises(ValueError, match="prediction"):
        plugins.build("steps", {"name": "ddim", "prediction": "sample"})


@pytest.mark.parametrize("make", [lambda: DDIM(1.5), lambda: DDIM(-0.1), lambda: DDIM(1.0, "velocity")])
def test_impossible_settings_are_refused(make):
    with pytest.raises(ValueError, match="must be"):
        make()
