"""Dance-SDE, CPS and flow-matching DDIM: golden steps, and what each keeps of the law of a Gaussian target."""

import itertools
import math

import pytest
import torch
from gaussian_target import C, M, line, propagate

from flowrl_img import plugins
from flowrl_img.kernels.logprob import Density, Square, kl, kl_sigma
from flowrl_img.kernels.transition import E2, transition_moments
from flowrl_img.samplers.schedules import flow_match_sigmas
from flowrl_img.samplers.steps.cps import CPS
from flowrl_img.samplers.steps.dance_sde import DanceSDE
from flowrl_img.samplers.steps.flow_ddim import FlowDDIM
from flowrl_img.samplers.steps.flow_sde import FlowSDE
from flowrl_img.samplers.steps.ode import ODE


def wide(scalar, like):
    return scalar.to(like).view(-1, *[1] * (like.ndim - 1))


def walk(case, table, weighting, steps, given=()):
    """Mean, successor and log-prob of every step from the same x, v and z, and the log-prob of x_given if named."""
    x, v, z = (case[k].double() for k in ("x", "v", "z"))
    found = {"mean": [], "next": [], "logp": [], "logp_given": []}
    for i in range(steps):
        row = table.rows(torch.full((len(x),), i))
        mean = wide(row.A, x) * x + wide(row.B, x) * v
        x_s = mean + wide(row.std, x) * z
        found["mean"].append(mean)
        found["next"].append(x_s)
        for name, at in (("logp", x_s), *(("logp_given", case[k].double()) for k in given)):
            moments = transition_moments(v, None, 1.0, x, at, row.A, row.B)
            found[name].append(weighting.log_prob(moments[:, E2], row.std))
    return {name: torch.stack(values) for name, values in found.items() if values}


@pytest.mark.parametrize(
    ("name", "rule", "weighting"),
    [
        ("dance_sd3N10_a0.3", DanceSDE(0.3), Density()),
        ("dance_sd3N10_a0.7", DanceSDE(0.7), Density()),
        ("cps_sd3N10_a0.3", CPS(0.3), Square()),
        ("cps_packed_sd3N10_a0.7", CPS(0.7), Square()),
        ("cps_sd3N10_a0.8", CPS(0.8), Square()),
        ("cps_sd3N10_a1.2", CPS(1.2), Square()),
    ],
)
def test_every_step_matches_golden_mean_std_and_log_prob(golden, name, rule, weighting):
    case = golden("sde_steps", name)
    table = rule.coefficients(case["sigmas"])
    case.check("std", table.std)
    case.check("std_dev_t", table.sigma_t)
    found = walk(case, table, weighting, 10, given=("x_given",))
    for output in ("mean", "logp", "logp_given"):
        case.check(output, found[output])


def test_flow_ddim_steps_match_golden_numbers(golden):
    case = golden("sde_steps", "flow_ddim_sd3N10_eta1")
    found = walk(case, FlowDDIM(1.0).coefficients(case["sigmas"]), Density(), 9)
    case.check("next", found["next"])
    case.check("logp", found["logp"])


def test_rows_at_mixed_steps_match_golden_numbers(golden):
    case = golden("sde_steps", "cps_mixed_rows_packed")
    row = CPS(0.6).coefficients(case["sigmas"]).rows(case["step_index"])
    x, v, z = (case[k].double() for k in ("x", "v", "z"))
    mean = wide(row.A, x) * x + wide(row.B, x) * v
    x_s = mean + wide(row.std, x) * z
    moments = transition_moments(v, None, 1.0, x, x_s, row.A, row.B)
    for name, value in (("mean", mean), ("std", row.std), ("next", x_s)):
        case.check(name, value)
    case.check("logp", Square().log_prob(moments[:, E2], row.std))


# --- scalars -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise_level", [0.0, 0.3, 0.8, 1.0, 1.2, 1.9])
def test_cps_keeps_the_coefficients_of_image_and_noise(noise_level):
    """With x0 and eps known, x_s has exactly (1 - s) of the one and, kept and fresh together, s of the other."""
    sigmas = flow_match_sigmas(10)
    t, s = sigmas[:-1], sigmas[1:]
    table = CPS(noise_level).coefficients(sigmas)
    of_x0 = table.A * (1 - t) - table.B
    of_eps = table.A * t + table.B
    torch.testing.assert_close(of_x0, 1 - s, rtol=0, atol=1e-14)
    torch.testing.assert_close(of_eps**2 + table.std**2, s**2, rtol=1e-12, atol=1e-16)
    assert (of_eps > -1e-15).all()  # the positive root, also where cos(a pi / 2) < 0


@pytest.mark.parametrize("eta", [0.3, 1.0])
def test_flow_ddim_keeps_the_coefficients_too_and_adds_the_posterior_std(eta):
    sigmas = flow_match_sigmas(10)
    t, s = sigmas[:-1], sigmas[1:]
    table = FlowDDIM(eta).coefficients(sigmas)
    torch.testing.assert_close((table.A * t + table.B) ** 2 + table.std**2, s**2, rtol=1e-12, atol=1e-16)
    # x_t given x_s is N(r x_s, q) with r = (1 - t) / (1 - s) and q = t^2 - r^2 s^2; the posterior of x_s given x0 and
    # x_t has precision 1 / s^2 + r^2 / q
    r = (1 - t[1:-1]) / (1 - s[1:-1])
    posterior = 1 / (1 / s[1:-1] ** 2 + r**2 / (t[1:-1] ** 2 - r**2 * s[1:-1] ** 2))
    torch.testing.assert_close(table.std[1:-1], eta * posterior.sqrt(), rtol=1e-12, atol=0)


def test_dance_and_flow_are_one_sde_with_two_diffusion_coefficients():
    """Where a sqrt(t / (1 - t)) is the Dance level, one step of both is the same."""
    sigmas = flow_match_sigmas(10)[3:5]
    t = float(sigmas[0])
    dance, flow = DanceSDE(0.5).coefficients(sigmas), FlowSDE(0.5 * math.sqrt((1 - t) / t)).coefficients(sigmas)
    for name in ("A", "B", "std", "sigma_t"):
        torch.testing.assert_close(getattr(dance, name), getattr(flow, name), rtol=1e-13, atol=0)


def test_both_kl_forms_follow_from_each_rule():
    """With the sigma_t of each rule, the published form is (-dt) times the true one, or equal where there is no dt."""
    sigmas = flow_match_sigmas(10)
    one, dt = torch.ones(9, dtype=torch.float64), sigmas.diff()[:9]
    for rule, factor in ((DanceSDE(0.3), -dt), (FlowSDE(0.7), -dt), (CPS(0.8), one), (FlowDDIM(1.0), one)):
        table = rule.coefficients(sigmas)
        published = kl_sigma(one, table.B[:9], table.sigma_t[:9])
        torch.testing.assert_close(published, factor * kl(one, table.B[:9], table.std[:9]), rtol=1e-12, atol=0)


def test_the_first_step_from_pure_noise_has_the_written_std():
    sigmas = flow_match_sigmas(10)
    s, dt = float(sigmas[1]), float(sigmas[0] - sigmas[1])
    expected = {DanceSDE(0.3): 0.3 * math.sqrt(dt), CPS(0.8): s * math.sin(0.4 * math.pi), FlowDDIM(0.5): 0.5 * s}
    for rule, std in expected.items():
        assert rule.coefficients(sigmas).std[0].item() == pytest.approx(std, rel=1e-12)


@pytest.mark.parametrize(
    "make",
    [
        lambda: DanceSDE(-0.1),
        lambda: DanceSDE(math.inf),
        lambda: CPS(2.0),
        lambda: CPS(math.nan),
        lambda: FlowDDIM(1.1),
        lambda: FlowDDIM(-0.1),
    ],
)
def test_impossible_noise_is_refused(make):
    with pytest.raises(ValueError, match="must be"):
        make()


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"name": "cps", "noise_level": 0.8}, CPS(0.8)),
        ({"name": "dance_sde"}, DanceSDE(0.3)),
        ({"name": "flow_ddim", "eta": 0.5}, FlowDDIM(0.5)),
    ],
)
def test_rules_are_named_in_a_recipe_by_their_file(section, expected):
    assert plugins.build("steps", section) == expected


# --- laws ----------------------------------------------------------------------------------------------------------


def bias(rule, num_steps):
    """Relative error of the std of the final state; its mean is exact."""
    mean, variance = propagate(rule.coefficients(line(num_steps)), line(num_steps))
    assert mean == pytest.approx(M, abs=1e-10)
    return abs(math.sqrt(variance) / C - 1)


@pytest.mark.parametrize(
    "rule", [ODE(), DanceSDE(0.3), DanceSDE(0.7), FlowSDE(1.2), FlowDDIM(0.5), FlowDDIM(1.0)], ids=str
)
def test_the_law_of_the_target_is_kept_at_first_order(rule):
    errors = [bias(rule, n) for n in (200, 400, 800)]
    assert errors[1] < 0.02
    for coarse, fine in itertools.pairwise(errors):
        assert math.log2(coarse / fine) == pytest.approx(1, abs=0.06)


def test_flow_sde_is_within_two_percent_of_the_law_at_400_steps():
    """Its order is that of test_flow_sde: the endpoint rule leaves N^(-noise_level^2), of the other sign at a = 0.7."""
    assert bias(FlowSDE(0.7), 400) < 0.003


def test_cps_narrows_the_law_however_many_steps_it_takes():
    """Coefficients are kept and the law is not: a fixed share of noise replaced at every step contracts the samples."""
    spreads = [1 - bias(CPS(0.8), n) for n in (100, 400, 1600)]
    assert spreads[1] == pytest.approx(0.802, abs=0.002)
    assert max(spreads) < 0.82
