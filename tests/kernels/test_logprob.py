"""Log-prob, ratio and KL against torch.distributions, and the accuracy that small clip ranges need."""

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from flowrl_img.kernels.logprob import (
    WEIGHTINGS,
    DeterministicStepError,
    guard_log_ratio,
    kl,
    kl_sigma,
    log_prob,
    log_ratio,
)
from flowrl_img.kernels.transition import CROSS, DOLD2, DREF2, E2, transition_moments
from flowrl_img.samplers.steps.flow_sde import FlowSDE

ROWS, SHAPE = 3, (3, 4, 16, 16)
A = torch.tensor([0.755, 0.884, 0.909], dtype=torch.float64)
B = torch.tensor([-0.0399, -0.0838, -0.3351], dtype=torch.float64)
STD = torch.tensor([0.700, 0.446, 0.225], dtype=torch.float64)


@pytest.fixture(autouse=True)
def _reference_body(monkeypatch):
    monkeypatch.setenv("FLOWRL_KERNELS", "torch")


def wide(scalar):
    return scalar.view(ROWS, 1, 1, 1)


def transition(shift, dtype=torch.float64, seed=0):
    """A rollout step of the old policy, and a current and a reference velocity `shift` away from it."""
    stream = torch.Generator().manual_seed(seed)
    x_t, v_old, z, d, d_ref = (torch.randn(SHAPE, generator=stream, dtype=torch.float64) for _ in range(5))
    x_t, v_old = x_t.to(dtype), v_old.to(dtype)
    v, v_ref = (v_old + shift * d).to(dtype), (v_old + shift * d_ref).to(dtype)
    x_s = (wide(A) * x_t.double() + wide(B) * v_old.double() + wide(STD) * z).to(dtype)
    return x_t, x_s, v, v_old, v_ref


def distribution(x_t, v):
    return Normal(wide(A) * x_t + wide(B) * v, wide(STD))


def per_row_mean(x):
    return x.mean((1, 2, 3))


def test_log_prob_ratio_and_kl_equal_those_of_torch_distributions():
    x_t, x_s, v, v_old, v_ref = transition(0.3)
    moments = transition_moments(v, None, 1.0, x_t, x_s, A, B, v_old=v_old, v_ref=v_ref)
    p, p_old, p_ref = (distribution(x_t, w) for w in (v, v_old, v_ref))
    expected = per_row_mean(p.log_prob(x_s))
    torch.testing.assert_close(log_prob(moments[:, E2], STD), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        log_ratio(moments[:, DOLD2], moments[:, CROSS], B, STD),
        expected - per_row_mean(p_old.log_prob(x_s)),
        rtol=1e-10,
        atol=1e-13,
    )
    torch.testing.assert_close(
        kl(moments[:, DREF2], B, STD), per_row_mean(kl_divergence(p, p_ref)), rtol=1e-12, atol=1e-14
    )


def test_the_published_kl_is_minus_dt_times_the_true_one():
    dt, DREF2_row = -0.05, torch.tensor([0.2, 0.3, 0.4], dtype=torch.float64)
    sigma_t = STD / (-dt) ** 0.5
    torch.testing.assert_close(kl_sigma(DREF2_row, B, sigma_t), -dt * kl(DREF2_row, B, STD))


def test_gradients_of_log_prob_and_kl_are_their_closed_forms():
    x_t, x_s, v, _, v_ref = transition(0.3)
    v.requires_grad_()
    moments = transition_moments(v, None, 1.0, x_t, x_s, A, B, v_ref=v_ref)
    D = v[0].numel()
    (from_log_prob,) = torch.autograd.grad(log_prob(moments[:, E2], STD).sum(), v, retain_graph=True)
    (from_kl,) = torch.autograd.grad(kl(moments[:, DREF2], B, STD).sum(), v)
    e = x_s - wide(A) * x_t - wide(B) * v.detach()
    torch.testing.assert_close(from_log_prob, wide(B) * e / (wide(STD) ** 2 * D), rtol=1e-11, atol=1e-16)
    torch.testing.assert_close(
        from_kl, wide(B) ** 2 * (v.detach() - v_ref) / (wide(STD) ** 2 * D), rtol=1e-11, atol=1e-16
    )


def test_at_the_old_policy_the_ratio_gradient_is_b_z_over_std():
    x_t, x_s, _, v_old, _ = transition(0.0)
    v = v_old.clone().requires_grad_()
    moments = transition_moments(v, None, 1.0, x_t, x_s, A, B, v_old=v_old)
    ratio = log_ratio(moments[:, DOLD2], moments[:, CROSS], B, STD).exp()
    assert torch.equal(ratio, torch.ones_like(ratio))
    ratio.sum().backward()
    z = (x_s - wide(A) * x_t - wide(B) * v_old) / wide(STD)
    torch.testing.assert_close(v.grad, wide(B) * z / (wide(STD) * v[0].numel()), rtol=1e-10, atol=1e-16)


def test_in_float32_the_difference_form_resolves_ratios_far_below_every_clip_range():
    """Clip ranges go down to 2e-6. Subtracting float32 log-probs is off by more than 3e-8, this form by under 1e-10."""
    worst_form, worst_subtraction = 0.0, 0.0
    for seed in range(5):
        x_t, x_s, v, v_old, _ = transition(1e-4, torch.float32, seed)
        narrow = transition_moments(v, None, 1.0, x_t, x_s, A, B, v_old=v_old)
        exact = transition_moments(v.double(), None, 1.0, x_t, x_s, A, B, v_old=v_old)
        truth = log_ratio(exact[:, DOLD2], exact[:, CROSS], B, STD)
        old = transition_moments(v_old, None, 1.0, x_t, x_s, A, B)
        form = log_ratio(narrow[:, DOLD2], narrow[:, CROSS], B, STD)
        subtraction = log_prob(narrow[:, E2], STD) - log_prob(old[:, E2], STD)
        assert 1e-8 < truth.abs().max() < 1e-4
        worst_form = max(worst_form, (form.double() - truth).abs().max().item())
        worst_subtraction = max(worst_subtraction, (subtraction.double() - truth).abs().max().item())
    assert worst_form < 1e-10
    assert worst_subtraction > 3e-8


def test_scalars_may_come_from_the_host_in_float64():
    x_t, x_s, v, v_old, _ = transition(0.3, torch.float32)
    moments = transition_moments(v, None, 1.0, x_t, x_s, A, B, v_old=v_old)
    assert log_prob(moments[:, E2], STD).dtype == torch.float32
    assert log_ratio(moments[:, DOLD2], moments[:, CROSS], B, STD).dtype == torch.float32


# --- GRPO-Guard -----------------------------------------------------------------------------------------------------

GUARD = [f"guard_{name}" for name in ("s0", "s2", "s5", "s8", "s2_large", "s6_large", "s0_large", "s3_kl")]


def guarded(case, rows):
    """Moments of the current velocity and the table of its rows, in float64; v requires a gradient."""
    table = FlowSDE(case.scalars["noise_level"]).coefficients(case["sigmas"]).rows(rows)
    x_t, x_s, v, v_old = (case[k].double() for k in ("x", "x_next", "v_theta", "v_old"))
    v.requires_grad_()
    return v, transition_moments(v, None, 1.0, x_t, x_s, table.A, table.B, v_old=v_old), table


@pytest.mark.parametrize("name", [*GUARD, "guard_s4_outside_pos", "guard_s4_outside_neg"])
def test_the_guard_exponent_meets_the_published_ratio_loss_and_gradient(golden, name):
    case = golden("guard", name)
    v, moments, table = guarded(case, case["step_index"])
    ratio = guard_log_ratio(moments[:, CROSS], table.B, table.std).exp()
    advantage, clip = case["advantages"].clamp(-5, 5), case.scalars["clip_range"]
    surrogate = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - clip, 1 + clip)) / -table.dt
    case.check("ratio", ratio)
    case.check("policy_loss", surrogate.mean())
    if name != "guard_s3_kl":  # that loss holds a KL too
        surrogate.mean().backward()
        case.check("grad_v_theta", v.grad)


def test_the_guard_exponent_of_a_row_does_not_depend_on_the_rows_beside_it(golden):
    case = golden("guard", "trap_guard_batch_bias")
    _, moments, table = guarded(case, torch.full((3,), case.scalars["step_index"]))
    case.check("ratio_per_sample", guard_log_ratio(moments[:, CROSS], table.B, table.std).exp())


def test_the_guard_exponent_is_the_log_ratio_freed_of_its_bias_times_std():
    x_t, x_s, v, v_old, _ = transition(0.3)
    moments = transition_moments(v, None, 1.0, x_t, x_s, A, B, v_old=v_old)
    bias = per_row_mean((wide(B) * (v - v_old)) ** 2) / (2 * STD**2)
    expected = STD * (log_ratio(moments[:, DOLD2], moments[:, CROSS], B, STD) + bias)
    found = guard_log_ratio(moments[:, CROSS], B, STD)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-14)
    z = (x_s - wide(A) * x_t - wide(B) * v_old) / wide(STD)
    torch.testing.assert_close(found, per_row_mean(wide(B) * (v - v_old) * z), rtol=1e-10, atol=1e-14)


# --- the two conventions -------------------------------------------------------------------------------------------


def test_the_square_convention_is_minus_the_mean_squared_deviation():
    x_t, x_s, v, _, _ = transition(0.3)
    moments = transition_moments(v, None, 1.0, x_t, x_s, A, B)
    deviation = x_s - wide(A) * x_t - wide(B) * v
    expected = -per_row_mean(deviation**2)
    torch.testing.assert_close(WEIGHTINGS["square"].log_prob(moments[:, E2], STD), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", WEIGHTINGS)
def test_each_convention_has_the_ratio_of_its_own_log_probs_in_difference_form(name):
    x_t, x_s, v, v_old, _ = transition(0.3)
    weighting = WEIGHTINGS[name]
    moments = transition_moments(v, None, 1.0, x_t, x_s, A, B, v_old=v_old)
    old = transition_moments(v_old, None, 1.0, x_t, x_s, A, B)
    expected = weighting.log_prob(moments[:, E2], STD) - weighting.log_prob(old[:, E2], STD)
    found = weighting.log_ratio(moments[:, DOLD2], moments[:, CROSS], B, STD)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-13)
    unmoved = transition_moments(v_old, None, 1.0, x_t, x_s, A, B, v_old=v_old)
    assert not weighting.log_ratio(unmoved[:, DOLD2], unmoved[:, CROSS], B, STD).any()


def test_the_square_ratio_is_twice_the_variance_times_the_density_ratio():
    x_t, x_s, v, v_old, _ = transition(0.3)
    moments = transition_moments(v, None, 1.0, x_t, x_s, A, B, v_old=v_old)
    square, density = (
        WEIGHTINGS[name].log_ratio(moments[:, DOLD2], moments[:, CROSS], B, STD) for name in ("square", "density")
    )
    torch.testing.assert_close(square, 2 * STD**2 * density, rtol=1e-12, atol=0)


def test_in_float32_the_square_ratio_is_as_sharp_as_the_density_ratio():
    for seed in range(3):
        x_t, x_s, v, v_old, _ = transition(1e-4, torch.float32, seed)
        narrow = transition_moments(v, None, 1.0, x_t, x_s, A, B, v_old=v_old)
        exact = transition_moments(v.double(), None, 1.0, x_t, x_s, A, B, v_old=v_old)
        found, truth = (WEIGHTINGS["square"].log_ratio(m[:, DOLD2], m[:, CROSS], B, STD) for m in (narrow, exact))
        assert (found.double() - truth).abs().max() < 1e-10


def test_a_step_without_noise_has_no_density_but_has_a_square():
    zero = torch.tensor([0.0, 0.3, 0.3])
    one = torch.ones(3)
    with pytest.raises(DeterministicStepError, match="no density"):
        WEIGHTINGS["density"].log_prob(one, zero)
    with pytest.raises(DeterministicStepError, match="no density"):
        WEIGHTINGS["density"].log_ratio(one, one, one, zero)
    assert WEIGHTINGS["square"].log_prob(one, zero).tolist() == [-1.0] * 3
