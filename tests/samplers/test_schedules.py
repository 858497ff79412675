"""The grids are the stock pipelines' own, bit for bit, and making one disturbs nothing."""

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift, retrieve_timesteps

from flowrl_img.samplers.schedules import (
    dpm_flow_sigmas,
    flow_match_sigmas,
    flux_sigmas,
    qwen_image_sigmas,
    scheduler_sigmas,
    uniform_sigmas,
)

QWEN_IMAGE = {  # the scheduler configuration of the Qwen-Image release
    "use_dynamic_shifting": True,
    "time_shift_type": "exponential",
    "base_shift": 0.5,
    "max_shift": 0.9,
    "base_image_seq_len": 256,
    "max_image_seq_len": 8192,
    "shift": 1.0,
    "shift_terminal": 0.02,
}


@pytest.mark.parametrize("num_steps", [1, 2, 4, 10, 28, 40, 1000])
@pytest.mark.parametrize("shift", [1.0, 3.0, 5.5, 7.0])
def test_sd3_grid_and_timesteps_are_bitwise_those_of_the_scheduler(num_steps, shift):
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(num_steps)
    sigmas = flow_match_sigmas(num_steps, shift=shift)
    assert torch.equal(sigmas, scheduler.sigmas.double())
    assert torch.equal(sigmas[:-1].float() * 1000, scheduler.timesteps)


@pytest.mark.parametrize("num_steps", [1, 6, 28])
@pytest.mark.parametrize("num_tokens", [256, 1000, 4096])
def test_flux_grid_is_bitwise_that_of_the_scheduler(num_steps, num_tokens):
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
    expected = scheduler_sigmas(scheduler, num_steps, num_tokens, levels=uniform_sigmas(num_steps))
    assert torch.equal(flux_sigmas(num_steps, num_tokens), expected)


@pytest.mark.parametrize("num_steps", [2, 10, 50])
@pytest.mark.parametrize("num_tokens", [1024, 4096, 6032])
def test_qwen_image_grid_is_bitwise_that_of_the_pipeline(num_steps, num_tokens):
    scheduler = FlowMatchEulerDiscreteScheduler(**QWEN_IMAGE)
    mu = calculate_shift(num_tokens, 256, 8192, 0.5, 0.9)
    retrieve_timesteps(scheduler, num_steps, "cpu", sigmas=np.linspace(1.0, 1 / num_steps, num_steps), mu=mu)
    sigmas = qwen_image_sigmas(num_steps, num_tokens)
    assert torch.equal(sigmas, scheduler.sigmas.double())
    assert sigmas[-2].item() == pytest.approx(0.02, abs=1e-6)
    assert torch.equal(sigmas, scheduler_sigmas(scheduler, num_steps, num_tokens, levels=uniform_sigmas(num_steps)))


def test_dpm_flow_grid_matches_golden_numbers(golden):
    golden("schedules", "dpm_flow_shift3_N10").check("sigmas", dpm_flow_sigmas(10))


@pytest.mark.parametrize("num_steps", [4, 10, 28, 40])
def test_sd3_grid_matches_golden_numbers(golden, num_steps):
    case = golden("schedules", f"sd3_shift3_N{num_steps}")
    sigmas = flow_match_sigmas(num_steps)
    case.check("sigmas", sigmas)
    case.check("timesteps", 1000 * sigmas[:-1])


@pytest.mark.parametrize(
    ("num_tokens", "num_steps"), [(256, 6), (256, 10), (256, 28), (1024, 6), (1024, 10), (4096, 10), (4096, 28)]
)
def test_flux_grid_matches_golden_numbers(golden, num_tokens, num_steps):
    golden("schedules", f"flux_tok{num_tokens}_N{num_steps}").check("sigmas", flux_sigmas(num_steps, num_tokens))


def test_the_last_level_is_shifted_twice():
    # hand: the line ends at 3 * .001 / 1.002 = .0029940; shifted once more, 3 * .0029940 / 1.0059880 = .0089286
    assert flow_match_sigmas(10)[-2].item() == pytest.approx(0.0089286, abs=5e-8)


@pytest.mark.parametrize("options", [{"shift": 3.0}, {"use_dynamic_shifting": True}, {"use_karras_sigmas": True}])
def test_a_scheduler_gives_its_grid_and_stays_untouched(options):
    scheduler = FlowMatchEulerDiscreteScheduler(**options)
    scheduler.set_timesteps(7, mu=0.7)
    scheduler.step(torch.zeros(1), scheduler.timesteps[0], torch.zeros(1))
    before = scheduler.timesteps.clone(), scheduler.sigmas.clone(), scheduler.step_index
    sigmas = scheduler_sigmas(scheduler, 5, num_tokens=1024)
    assert torch.equal(scheduler.timesteps, before[0])
    assert torch.equal(scheduler.sigmas, before[1])
    assert scheduler.step_index == before[2] == 1
    fresh = FlowMatchEulerDiscreteScheduler(**options)
    fresh.set_timesteps(5, mu=0.5 + (1024 - 256) / (4096 - 256) * (1.15 - 0.5))
    torch.testing.assert_close(sigmas, fresh.sigmas.double(), rtol=0, atol=1e-7)  # mu may differ by an ulp


def test_dynamic_shifting_without_token_count_is_refused():
    with pytest.raises(ValueError, match="pass num_tokens"):
        scheduler_sigmas(FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True), 4)


def test_a_scheduler_that_runs_from_data_to_noise_is_refused():
    with pytest.raises(ValueError, match="invert_sigmas"):
        scheduler_sigmas(FlowMatchEulerDiscreteScheduler(invert_sigmas=True), 4)


@pytest.mark.parametrize(
    "make",
    [
        flow_match_sigmas,
        uniform_sigmas,
        dpm_flow_sigmas,
        lambda n: flux_sigmas(n, 256),
        lambda n: qwen_image_sigmas(n + 1, 256),
    ],
)
def test_a_grid_of_no_steps_is_refused(make):
    with pytest.raises(ValueError, match="num_steps"):
        make(0)
