"""Losses of DiffusionNFT, AWM and DGPO formed from the moments, against published code and their own identities."""

import pytest
import torch

from flowrl_img.kernels.matching import (
    DISCREPANCIES,
    Elbo,
    GeneralisedHuber,
    Huber,
    Power,
    branch_loss,
    branch_weight,
    other_error,
)
from flowrl_img.kernels.matching_moments import (
    DEMA2,
    DREF2,
    E2,
    GAIN_OLD,
    GAIN_REF,
    MINUS1,
    MINUS2,
    PLUS1,
    PLUS2,
    matching_moments,
)

F64 = torch.float64


@pytest.fixture(autouse=True)
def _reference_body(monkeypatch):
    monkeypatch.setenv("FLOWRL_KERNELS", "torch")


def moments_of(case, dtype=F64, **options):
    """The moments of a golden case and its velocity, which asks for a gradient; in float64, as published losses are."""
    v = case["v_theta"].to(dtype).requires_grad_()
    others = {name: case[name].to(dtype) for name in ("v_old", "v_ref", "v_ema") if name in case.tensors}
    return matching_moments(v, case["x0"].to(dtype), case["eps"].to(dtype), **others, **options), v


NFT = ["nft_beta0.1", "nft_beta1_floor_row", "nft_theta_eq_old", "nft_beta0.1_packed_f32"]


@pytest.mark.parametrize("name", NFT)
def test_the_loss_of_diffusion_nft_and_its_gradient_are_those_of_published_code(golden, name):
    case = golden("nft_loss", name)
    beta, clip = case.scalars["beta"], case.scalars["adv_clip_max"]
    t, r = case["t"], case["r"].double()
    M, v = moments_of(case, beta=beta)
    plus, minus = (branch_loss(M[:, square], M[:, size], t) for square, size in ((PLUS2, PLUS1), (MINUS2, MINUS1)))
    loss = clip * ((r * plus + (1 - r) * minus) / beta).mean() + case.scalars["kl_beta"] * M[:, DREF2].mean()
    loss.backward()
    case.check("positive_loss", plus)
    case.check("negative_loss", minus)
    case.check("weight_pos", branch_weight(M[:, PLUS1], t))
    case.check("weight_neg", branch_weight(M[:, MINUS1], t))
    case.check("kl", M[:, DREF2].mean())
    case.check("loss", loss)
    case.check("grad_v_theta", v.grad)


def test_equal_policies_have_equal_branches_to_the_bit(golden):
    M, _ = moments_of(golden("nft_loss", "nft_theta_eq_old"), torch.float32, beta=0.1)
    assert torch.equal(M[:, PLUS2], M[:, MINUS2])
    assert torch.equal(M[:, PLUS1], M[:, MINUS1])
    assert not M[:, GAIN_OLD].any()


def test_the_floor_of_the_branch_weight_keeps_a_perfect_prediction_finite():
    zero, t = torch.zeros(2, requires_grad=True), torch.tensor([1.0, 0.5])
    assert branch_weight(zero, t).tolist() == pytest.approx([1e-5, 1e-5])
    loss = branch_loss(zero, zero, t)
    loss.sum().backward()
    assert loss.tolist() == [0, 0]
    assert zero.grad.tolist() == pytest.approx([1e5, 0.25e5])


AWM = {
    "awm_Uniform": Power(0),
    "awm_t": Power(1),
    "awm_t2": Power(2),
    "awm_huber": Huber(),
    "awm_ghuber": GeneralisedHuber(),
    "awm_ghuber_f32": GeneralisedHuber(),
    "awm_ghuber_sumfirst_elbo": GeneralisedHuber(),
    "awm_ghuber_offpolicy_clip": GeneralisedHuber(),
}


@pytest.mark.parametrize("name", AWM)
def test_the_surrogate_and_penalties_of_awm_are_those_of_published_code(golden, name):
    case = golden("awm_loss", name)
    M, _ = moments_of(case)
    penalty = {"Uniform": Power(0), "ELBO": Elbo()}[case.scalars["kl_weight"]]
    case.check("logp", -AWM[name](M[:, E2], case["t"]))
    case.check("kl", penalty(M[:, DREF2], case["t"]).mean())
    case.check("kl_ema", penalty(M[:, DEMA2], case["t"]).mean())


@pytest.mark.parametrize("name", [name for name in AWM if "sumfirst" not in name and "offpolicy" not in name])
def test_the_gradient_of_awm_on_policy_is_that_of_published_code(golden, name):
    case = golden("awm_loss", name)
    s = case.scalars
    M, v = moments_of(case)
    A = (case["advantages"].double().clamp(-s["adv_clip_max"], s["adv_clip_max"]) / s["adv_clip_max"]).repeat(s["T"])
    log_prob = -AWM[name](M[:, E2], case["t"])
    policy = -(A * (log_prob - log_prob.detach()).exp()).mean()
    (policy + s["beta"] * M[:, DREF2].mean() + s["ema_beta"] * M[:, DEMA2].mean()).backward()
    case.check("grad_v_theta", v.grad)


@pytest.mark.parametrize("name", ["dgpo_b10_clip1e-2", "dgpo_b100_interleaved_clipkl", "dgpo_b2000_emaref"])
def test_the_loss_of_dgpo_and_its_gradient_are_those_of_published_code(golden, name):
    case = golden("dgpo_loss", name)
    s, group = case.scalars, case["group_id"]
    M, v = moments_of(case)
    A = case["advantages"].clamp(-s["adv_clip_max"], s["adv_clip_max"])
    gain = M[:, GAIN_OLD if s["use_ema_ref"] else GAIN_REF].detach()
    score = torch.zeros(int(group.max()) + 1, dtype=F64).index_add(0, group, A * s["beta_dpo"] * gain / s["group_size"])
    weight = score.sigmoid()[group]
    growth = torch.expm1(-M[:, GAIN_OLD].detach())  # ratio - 1
    outside = torch.where(A > 0, growth > s["clip_range"], growth < -s["clip_range"])
    error, kl = M[:, E2], M[:, DREF2]
    loss = (weight * A * torch.where(outside, error.detach(), error)).mean()
    total = loss + s["beta"] * (torch.where(outside, kl.detach(), kl) if s["clip_kl"] else kl).mean()
    total.backward()
    case.check("dsm", error)
    case.check("group_weight_row", weight)
    case.check("should_clip", outside.double())
    case.check("policy_loss", loss)
    case.check("loss", total)
    case.check("grad_v_theta", v.grad)


def test_the_error_of_another_velocity_is_that_of_scoring_it_alone(golden):
    case = golden("dgpo_loss", "dgpo_b10_clip1e-2")
    M, _ = moments_of(case)
    alone = matching_moments(case["v_ref"], case["x0"], case["eps"])[:, E2]
    torch.testing.assert_close(other_error(M[:, E2], M[:, GAIN_REF]), alone, rtol=1e-12, atol=0)


def test_the_state_gives_the_same_moments_as_the_noise_it_was_made_from():
    x0, eps, v, v_old = torch.randn(4, 3, 4, 8, 8, dtype=F64, generator=torch.Generator().manual_seed(0))
    t = torch.tensor([1.0, 0.5, 0.01], dtype=F64)
    x_t = (1 - t.view(-1, 1, 1, 1)) * x0 + t.view(-1, 1, 1, 1) * eps
    by_noise = matching_moments(v, x0, eps, v_old=v_old, beta=0.5)
    by_state = matching_moments(v, x0, x_t=x_t, t=t, v_old=v_old, beta=0.5)
    torch.testing.assert_close(by_state, by_noise, rtol=1e-11, atol=1e-12)  # 1/t times float64's rounding of x_t


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eps": None}, "either eps alone, or x_t together with t"),
        ({"x_t": torch.zeros(2, 3)}, "either eps alone"),
        ({"t": torch.ones(2)}, "either eps alone"),
        ({"eps": None, "x_t": torch.zeros(2, 3)}, "either eps alone"),
        ({"beta": 0.5}, "pass v_old"),
    ],
)
def test_a_target_given_twice_or_not_at_all_is_refused_with_the_fix(changes, message):
    arguments = {"v": torch.zeros(2, 3), "x0": torch.zeros(2, 3), "eps": torch.zeros(2, 3)} | changes
    with pytest.raises(ValueError, match=message):
        matching_moments(**arguments)


# --- accuracy of gains and differences -----------------------------------------------------------------------------


def test_in_float32_the_gain_resolves_differences_far_below_the_clip_ranges_of_dgpo():
    """They go down to 1e-5, and the sigmoid multiplies gains by up to 2000. Subtracting means is off by about 1e-7."""
    worst_gain, worst_subtraction = 0.0, 0.0
    for seed in range(5):
        x0, eps, move, off = torch.randn(4, 3, 4, 16, 16, generator=torch.Generator().manual_seed(seed))
        v_old = eps - x0 + off
        v = v_old + 1e-4 * move
        M = matching_moments(v, x0, eps, v_old=v_old)
        exact = matching_moments(*(x.double() for x in (v, x0, eps)), v_old=v_old.double())
        subtraction = M[:, E2] - matching_moments(v_old, x0, eps)[:, E2]
        assert 1e-7 < exact[:, GAIN_OLD].abs().max() < 1e-3
        worst_gain = max(worst_gain, (M[:, GAIN_OLD] - exact[:, GAIN_OLD]).abs().max().item())
        worst_subtraction = max(worst_subtraction, (subtraction - exact[:, GAIN_OLD]).abs().max().item())
    assert worst_gain < 1e-9
    assert worst_subtraction > 3e-8


@pytest.mark.parametrize("name", DISCREPANCIES)
def test_the_difference_of_a_discrepancy_is_its_change_and_keeps_its_gradient(name):
    f = DISCREPANCIES[name]
    M, t = torch.tensor([0.9, 2.5, 0.3], dtype=F64, requires_grad=True), torch.tensor([0.2, 0.7, 1.0], dtype=F64)
    before = torch.tensor([0.4, 2.4, 0.7], dtype=F64)
    difference = f.difference(M, M - before, t)
    torch.testing.assert_close(difference, f(M, t) - f(before, t), rtol=1e-12, atol=1e-15)
    (found,) = torch.autograd.grad(difference.sum(), M, retain_graph=True)
    (expected,) = torch.autograd.grad(f(M, t).sum(), M)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", DISCREPANCIES)
def test_a_discrepancy_is_zero_without_error_and_grows_with_it(name):
    f, t = DISCREPANCIES[name], torch.full((4,), 0.6)
    values = f(torch.tensor([0.0, 1e-3, 1.0, 4.0]), t)
    assert values[0].abs() < 1e-9  # float32 rounds 1e-10^p
    assert (values.diff() > 0).all()
    assert not f.difference(torch.ones(4), torch.zeros(4), t).any()


def test_generalised_huber_of_power_one_half_is_twice_the_huber_and_of_one_is_the_mean_square():
    M, t = torch.tensor([0.5, 3.0], dtype=F64), torch.tensor([0.3, 0.9], dtype=F64)
    torch.testing.assert_close(GeneralisedHuber(0.5)(M, t), 2 * Huber()(M, t), rtol=1e-12, atol=0)
    torch.testing.assert_close(GeneralisedHuber(1.0)(M, t), Power(1)(M, t), rtol=1e-9, atol=0)


def test_at_the_old_policy_nft_is_advantage_weighted_matching_normalised_by_the_mean_error():
    """Gradient of r l+ / beta + (1 - r) l- / beta: (2 r - 1) that of t^2 mse / (t mean |v - v*|), for any beta."""
    x0, eps, v_old = torch.randn(3, 2, 3, 5, 5, dtype=F64, generator=torch.Generator().manual_seed(2))
    t, r = torch.tensor([0.3, 0.8], dtype=F64), torch.tensor([0.9, 0.2], dtype=F64)
    gradients = []
    for beta in (0.1, 1.0):
        v = v_old.clone().requires_grad_()
        M = matching_moments(v, x0, eps, v_old=v_old, beta=beta)
        plus, minus = branch_loss(M[:, PLUS2], M[:, PLUS1], t), branch_loss(M[:, MINUS2], M[:, MINUS1], t)
        ((r * plus + (1 - r) * minus) / beta).sum().backward()
        gradients.append(v.grad)
    v = v_old.clone().requires_grad_()
    M = matching_moments(v, x0, eps)
    scale = (v_old - (eps - x0)).abs().mean((1, 2, 3))
    ((2 * r - 1) * t * M[:, E2] / scale).sum().backward()
    for gradient in gradients:
        torch.testing.assert_close(gradient, v.grad, rtol=1e-11, atol=1e-15)
