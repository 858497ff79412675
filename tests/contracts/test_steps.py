"""What every step rule keeps, found by file name: finite scalars, exact determinism without noise, honest std, moments.

`process` of a rule says whether it steps flow-matching models, whose grids lead from 1 to 0, or diffusion models.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math

import pytest
import torch
from gaussian_target import exact_output, exact_velocity, line, propagate

from flowrl_img import plugins
from flowrl_img.kernels.logprob import Density, DeterministicStepError
from flowrl_img.samplers.diffusion import sd15_grid
from flowrl_img.samplers.loop import calm_rule, sample
from flowrl_img.samplers.schedules import flow_match_sigmas, flux_sigmas, qwen_image_sigmas
from flowrl_img.samplers.steps.ode import ODE

RULES = {name: plugins.build("steps", {"name": name}) for name in plugins.available("steps")}
INTERIOR = line(6, 0.95, 0.05)


def process_of(rule):
    return getattr(rule, "process", "flow")


def quiet(rule):
    """The rule with the setting of its noise, whatever it is called, at 0; None where it has no such setting."""
    for field in dataclasses.fields(rule):
        if isinstance(getattr(rule, field.name), float):
            with contextlib.suppress(ValueError):  # a setting that 0 is no value of
                calmed = dataclasses.replace(rule, **{field.name: 0.0})
                if not calmed.coefficients(INTERIOR).std.any():
                    return calmed
    return None


FLOW = sorted(name for name, rule in RULES.items() if process_of(rule) == "flow")
RANDOM = sorted(name for name, rule in RULES.items() if rule.coefficients(INTERIOR).std.any())
QUIET = {name: quiet(RULES[name]) for name in FLOW if name in RANDOM and quiet(RULES[name]) is not None}


def columns(table):
    return [table.A, table.B, table.std, table.sigma_t, table.dt]


def test_the_known_rules_are_found_and_told_apart():
    assert {"flow_sde", "dance_sde", "cps", "flow_ddim", "ddim", "ode"} <= set(RULES)
    assert "ddim" not in FLOW
    assert "ode" in FLOW and "ode" not in RANDOM
    assert {"flow_sde", "dance_sde", "cps", "flow_ddim"} <= set(QUIET)


@pytest.mark.parametrize("name", RULES)
def test_a_table_has_finite_float64_scalars_for_every_step(name):
    grids = [INTERIOR, *([flow_match_sigmas(10), flux_sigmas(6, 1024), line(1)] if name in FLOW else [])]
    for sigmas in grids:
        for column in columns(RULES[name].coefficients(sigmas)):
            assert column.shape == (len(sigmas) - 1,)
            assert column.dtype == torch.float64
            assert column.isfinite().all()
        assert (RULES[name].coefficients(sigmas).std >= 0).all()
        assert torch.equal(RULES[name].coefficients(sigmas).dt, sigmas.diff())


@pytest.mark.parametrize("name", RULES)
def test_scalars_of_a_step_depend_on_that_step_alone_away_from_the_noise_end(name):
    whole, part = RULES[name].coefficients(INTERIOR), RULES[name].coefficients(INTERIOR[2:5])
    for a, b in zip(columns(whole), columns(part)):
        assert torch.equal(a[2:4], b)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("sigmas", [INTERIOR.flip(0), INTERIOR * 1000, INTERIOR[:1]], ids=["rising", "scaled", "short"])
def test_a_table_of_other_units_or_order_is_refused(name, sigmas):
    with pytest.raises(ValueError, match="sigmas must"):
        RULES[name].coefficients(sigmas)


@pytest.mark.parametrize("name", QUIET)
def test_without_noise_a_flow_rule_is_the_euler_ode(name):
    for sigmas in (flow_match_sigmas(10), flux_sigmas(6, 1024), qwen_image_sigmas(10, 1024), INTERIOR):
        table, euler = QUIET[name].coefficients(sigmas), ODE().coefficients(sigmas)
        torch.testing.assert_close(table.A, euler.A, rtol=0, atol=1e-14)
        torch.testing.assert_close(table.B, euler.B, rtol=0, atol=1e-14)
        assert not table.std.any()


@pytest.mark.parametrize("name", sorted(set(RULES) - set(FLOW)))
def test_a_diffusion_rule_has_its_own_form_without_noise(name):
    assert not calm_rule(RULES[name]).coefficients(INTERIOR).std.any()


@pytest.mark.parametrize("name", FLOW)
def test_a_known_clean_image_stays_in_place(name):
    """x_t = (1 - t) x0 without noise has velocity -x0, and must go to (1 - s) x0."""
    sigmas = flow_match_sigmas(10)
    table = RULES[name].coefficients(sigmas)
    torch.testing.assert_close(table.A * (1 - sigmas[:-1]) - table.B, 1 - sigmas[1:], rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", RANDOM)
def test_the_std_that_draws_is_the_std_that_scores(name):
    sigmas = flow_match_sigmas(8) if name in FLOW else INTERIOR
    table = RULES[name].coefficients(sigmas)
    draws = torch.randn(50_000, 1, generator=torch.Generator().manual_seed(0))
    trained = [i for i in range(len(table.std)) if table.std[i] > 0]
    for step in (trained[0], trained[len(trained) // 2], trained[-1]):
        z = torch.randn(draws.shape, generator=torch.Generator().manual_seed(step + 1))
        kept = sample(
            lambda x, i, sigma: torch.tanh(x), draws, sigmas, RULES[name], (step,), lambda i, z=z: z, keep=(step,)
        ).kept[step]
        residual = kept.x_s.double() - table.A[step] * kept.x_t.double() - table.B[step] * kept.v.double()
        # 4 standard errors of the std of n draws, 1 / sqrt(2 n) each; the float32 state adds up to 1e-6 / std
        assert residual.std().item() == pytest.approx(float(table.std[step]), rel=4 / math.sqrt(2 * len(z)), abs=1e-6)


@pytest.mark.parametrize("name", RULES)
def test_a_step_without_noise_cannot_be_kept_or_scored_by_density(name):
    sigmas = flow_match_sigmas(4) if name in FLOW else line(4, 0.9, 0.0)
    table = RULES[name].coefficients(sigmas)
    for step in (i for i in range(4) if table.std[i] == 0):
        with pytest.raises(DeterministicStepError, match="cannot be trained"):
            sample(exact_velocity, torch.zeros(1), sigmas, RULES[name], (step,), lambda i: torch.zeros(1), (step,))
        with pytest.raises(DeterministicStepError, match="no density"):
            Density().log_prob(torch.ones(1), table.rows(torch.tensor([step])).std)


@pytest.mark.parametrize("num_steps", [4, 10, 40])
@pytest.mark.parametrize("name", RULES)
def test_sampled_moments_follow_the_linear_recursion(name, num_steps):
    """To 4 standard errors of 200k draws, in float64."""
    rule, draws, stream = RULES[name], 200_000, torch.Generator().manual_seed(0)
    sigmas, output = flow_match_sigmas(num_steps), exact_velocity
    if process_of(rule) == "diffusion":
        sigmas, output = sd15_grid(num_steps).sigmas, exact_output(rule.prediction)

    def normal(i=0):
        return torch.randn(draws, 1, dtype=torch.float64, generator=stream)

    x0 = sample(output, normal(), sigmas, rule, range(num_steps), normal).x0
    mean, variance = propagate(rule.coefficients(sigmas), sigmas, output=output)
    assert x0.mean().item() == pytest.approx(mean, abs=4 * math.sqrt(variance / draws))
    assert x0.var().item() == pytest.approx(variance, rel=4 * math.sqrt(2 / draws))


@pytest.mark.parametrize("name", RULES)
def test_rows_are_the_steps_they_name_in_any_order(name):
    table = RULES[name].coefficients(INTERIOR)
    index = torch.tensor([4, 0, 0, 2])
    for column, rows in zip(columns(table), columns(table.rows(index))):
        assert rows.tolist() == [column.tolist()[i] for i in index]
