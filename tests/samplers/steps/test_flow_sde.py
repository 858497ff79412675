"""Flow-SDE: published scalars, golden steps, and the laws it keeps on a target that can be solved exactly."""

import itertools
import math

import pytest
import torch
from gaussian_target import C, M, law, line, propagate

from flowrl_img.kernels.logprob import kl, kl_sigma, log_prob, log_ratio
from flowrl_img.kernels.transition import CROSS, DOLD2, DREF2, E2, transition_moments
from flowrl_img.samplers.schedules import flow_match_sigmas
from flowrl_img.samplers.steps.flow_sde import FlowSDE
from flowrl_img.samplers.steps.ode import ODE


def per_row(scalar, like):
    return scalar.to(like).view(-1, *[1] * (like.ndim - 1))


# --- scalars -------------------------------------------------------------------------------------------------------


def test_ten_sd3_steps_have_the_published_scalars():
    table = FlowSDE(0.7).coefficients(flow_match_sigmas(10))
    std = [0.700, 0.743, 0.536, 0.446, 0.392, 0.353, 0.319, 0.282, 0.225, 0.0063]
    B = [-0.0399, -0.0582, -0.0693, -0.0838, -0.1035, -0.1309, -0.1709, -0.2326, -0.3351, -0.0111]
    gradient_scale = [0.057, 0.078, 0.129, 0.188, 0.264, 0.371, 0.536, 0.825, 1.487]
    kl_code = [6e-5, 1.4e-4, 4.6e-4, 1.2e-3, 2.9e-3, 7.2e-3, 0.0197, 0.0636, 0.297]
    kl_true = [1.6e-3, 3.1e-3, 8.4e-3, 0.0177, 0.0349, 0.0688, 0.143, 0.340, 1.105]
    one = torch.ones(10, dtype=torch.float64)
    assert table.std.tolist() == pytest.approx(std, abs=6e-4)
    assert table.B.tolist() == pytest.approx(B, abs=6e-5)
    assert (table.B.abs() / table.std)[:9].tolist() == pytest.approx(gradient_scale, abs=6e-4)
    assert kl_sigma(one, table.B, table.sigma_t)[:9].tolist() == pytest.approx(kl_code, rel=0.1)
    assert kl(one, table.B, table.std)[:9].tolist() == pytest.approx(kl_true, rel=0.05)


def test_inside_the_grid_the_velocity_factor_is_a_constant_times_dt():
    sigmas = flow_match_sigmas(28)
    table = FlowSDE(0.9).coefficients(sigmas)
    torch.testing.assert_close(table.B[1:], (1 + 0.9**2 / 2) * sigmas.diff()[1:], rtol=1e-12, atol=0)
    torch.testing.assert_close(
        table.A[1:], 1 + 0.9**2 * sigmas.diff()[1:] / (2 * (1 - sigmas[1:-1])), rtol=1e-12, atol=0
    )


def test_the_noise_end_takes_its_std_from_the_second_level():
    table = FlowSDE(0.7).coefficients(flow_match_sigmas(10))
    assert table.std[0].item() == pytest.approx(0.7, rel=1e-12)
    assert table.B[0].item() == pytest.approx(flow_match_sigmas(10).diff()[0].item(), rel=1e-12)


def test_a_grid_that_misses_one_by_rounding_is_still_at_the_noise_end():
    exact, rounded = flow_match_sigmas(10), flow_match_sigmas(10)
    rounded[0] = 1 - 2**-24
    a, b = FlowSDE(0.7).coefficients(exact), FlowSDE(0.7).coefficients(rounded)
    for name in ("A", "B", "std", "sigma_t"):
        torch.testing.assert_close(getattr(a, name), getattr(b, name), rtol=2e-6, atol=0)


def test_a_grid_that_starts_just_below_one_is_refused_and_not_exploded():
    sigmas = flow_match_sigmas(10)
    sigmas[0] = 0.999
    with pytest.raises(ValueError, match="start the grid at 1"):
        FlowSDE(0.7).coefficients(sigmas)


def test_a_part_of_a_grid_has_the_same_scalars_as_the_whole():
    sigmas = flow_match_sigmas(10)
    whole, part = FlowSDE(0.7).coefficients(sigmas), FlowSDE(0.7).coefficients(sigmas[3:])
    assert torch.equal(whole.std[3:], part.std)
    assert torch.equal(whole.A[3:], part.A)


def test_zero_noise_level_is_the_ode():
    sigmas = flow_match_sigmas(10)
    table, euler = FlowSDE(0.0).coefficients(sigmas), ODE().coefficients(sigmas)
    assert torch.equal(table.A, euler.A)
    torch.testing.assert_close(table.B, euler.B, rtol=1e-15, atol=0)
    assert not table.std.any()


@pytest.mark.parametrize("noise_level", [-0.1, math.inf, math.nan])
def test_an_impossible_noise_level_is_refused(noise_level):
    with pytest.raises(ValueError, match="noise_level"):
        FlowSDE(noise_level)


# --- golden steps --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sd3N10_a0.3", "sd3N10_a0.7", "sd3N10_a1.2", "packed_sd3N10_a0.7"])
def test_every_step_matches_golden_mean_std_and_log_prob(golden, name):
    case = golden("flow_sde", f"flow_sde_{name}")
    table = FlowSDE(case.scalars["noise_level"]).coefficients(case["sigmas"])
    case.check("std", table.std)
    case.check("std_dev_t", table.sigma_t)
    x, v, z, given = (case[k].double() for k in ("x", "v", "z", "x_given"))
    means, log_probs, log_probs_given = [], [], []
    for i in range(10):
        row = table.rows(torch.full((2,), i))
        means.append(per_row(row.A, x) * x + per_row(row.B, x) * v)
        for found, x_s in ((log_probs, means[-1] + per_row(row.std, x) * z), (log_probs_given, given)):
            found.append(log_prob(transition_moments(v, None, 1.0, x, x_s, row.A, row.B)[:, E2], row.std))
    case.check("mean", torch.stack(means))
    case.check("logp", torch.stack(log_probs))
    case.check("logp_given", torch.stack(log_probs_given))


def test_rows_at_mixed_steps_match_golden_numbers(golden):
    case = golden("flow_sde", "flow_sde_mixed_rows")
    row = FlowSDE(0.7).coefficients(case["sigmas"]).rows(case["step_index"])
    x, v, z = (case[k].double() for k in ("x", "v", "z"))
    mean = per_row(row.A, x) * x + per_row(row.B, x) * v
    x_s = mean + per_row(row.std, x) * z
    case.check("std", row.std)
    case.check("mean", mean)
    case.check("next", x_s)
    case.check("logp", log_prob(transition_moments(v, None, 1.0, x, x_s, row.A, row.B)[:, E2], row.std))


GRPO = ["full_kl_s2", "full_kl_s0", "full_kl_s8_a1.2", "full_mixed_steps", "full_f32", "packed_flux_kl"]


@pytest.mark.parametrize("name", [*(f"flowgrpo_{n}" for n in GRPO), "tempflow_sd3_s3"])
def test_log_probs_ratio_and_both_kl_forms_match_golden_numbers(golden, name):
    case = golden("flow_grpo", name)
    row = FlowSDE(case.scalars["noise_level"]).coefficients(case["sigmas"]).rows(case["step_index"])
    x, x_s, v, old, ref = (case[k].double() for k in ("x", "x_next", "v_theta", "v_old", "v_ref"))
    moments = transition_moments(v, None, 1.0, x, x_s, row.A, row.B, v_old=old, v_ref=ref)
    case.check("logp_new", log_prob(moments[:, E2], row.std))
    case.check("logp_old", log_prob(transition_moments(old, None, 1.0, x, x_s, row.A, row.B)[:, E2], row.std))
    case.check("ratio", log_ratio(moments[:, DOLD2], moments[:, CROSS], row.B, row.std).exp())
    true_form = name.startswith("tempflow")
    kl_rows = kl(moments[:, DREF2], row.B, row.std) if true_form else kl_sigma(moments[:, DREF2], row.B, row.sigma_t)
    case.check("kl", kl_rows.mean())


@pytest.mark.parametrize("detached", [False, True])
def test_guided_gradients_match_golden_numbers(golden, detached):
    case = golden("flow_grpo", "grpo_cfg_detached_uncond" if detached else "grpo_cfg_full_grad")
    index = torch.full((3,), case.scalars["step_index"])
    row = FlowSDE(case.scalars["noise_level"]).coefficients(case["sigmas"]).rows(index)
    cond, uncond = case["v_cond"].clone().requires_grad_(), case["v_uncond"].clone().requires_grad_()
    guidance = case.scalars["guidance_scale"]
    moments = transition_moments(
        cond, uncond, guidance, case["x"], case["x_next"], row.A, row.B, detach_uncond=detached
    )
    logp, advantage, clip = log_prob(moments[:, E2], row.std), case["advantages"], case.scalars["clip_range"]
    ratio = (logp - case["logp_old"]).exp()
    loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - clip, 1 + clip)).mean()
    loss.backward()
    case.check("logp_new", logp.detach())
    case.check("loss", loss.detach())
    case.check("grad_v_cond", cond.grad)
    case.check("grad_v_uncond", torch.zeros_like(uncond) if uncond.grad is None else uncond.grad)
    assert detached == (uncond.grad is None)


# --- laws on the Gaussian target, beside those of tests/contracts/test_steps.py -------------------------------------


@pytest.mark.parametrize(("noise_level", "num_steps", "order"), [(0.0, 400, 1.0), (1.2, 400, 1.0), (0.7, 25_600, 0.49)])
def test_the_marginal_law_is_kept_as_steps_shrink(noise_level, num_steps, order):
    """The order is 1, except that the endpoint rule at t = 1 leaves an error that decays as N^(-noise_level^2)."""
    errors = []
    for n in (num_steps, 2 * num_steps):
        sigmas = line(n)
        mean, variance = propagate(FlowSDE(noise_level).coefficients(sigmas), sigmas)
        assert mean == pytest.approx(M, abs=1e-10)
        errors.append(abs(math.sqrt(variance) - C))
    assert errors[-1] < 1e-3
    assert math.log2(errors[0] / errors[1]) == pytest.approx(order, abs=0.06)


@pytest.mark.parametrize("noise_level", [0.3, 0.7, 1.2])
def test_below_the_noise_end_the_law_is_kept_at_first_order_at_every_noise_level(noise_level):
    """From the exact law at t = .95 to the data: the endpoint rule plays no part."""
    errors = []
    for n in (200, 400, 800):
        sigmas = line(n, 0.95)
        mean, variance = propagate(FlowSDE(noise_level).coefficients(sigmas), sigmas, *law(0.95))
        assert mean == pytest.approx(M, abs=1e-10)
        errors.append(abs(math.sqrt(variance) / C - 1))
    assert errors[1] < 0.02
    for coarse, fine in itertools.pairwise(errors):
        assert math.log2(coarse / fine) == pytest.approx(1, abs=0.06)
