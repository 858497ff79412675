import pytest
import torch

from flowrl_img.moments import matching_of, unit_means
from flowrl_img.objectives.awm import AWM

F64 = torch.float64
NAMES = {"Uniform": "uniform", "t": "t", "t**2": "t2", "huber": "huber", "ghuber": "ghuber", "ELBO": "elbo"}
ON_POLICY = ["awm_Uniform", "awm_t", "awm_t2", "awm_huber", "awm_ghuber", "awm_ghuber_f32", "awm_ghuber_sumfirst_elbo"]


def objective_of(case, **changes):
    s = case.scalars
    assert s["kl_weight"] == s["kl_ema_weight"]
    return AWM(
        NAMES[s["weighting"]], s["ghuber_power"], s["adv_clip_max"] / s["advantage_max"], s["clip_range"],
        kl_weight=s["beta"], trust_weight=s["ema_beta"], penalty=NAMES[s["kl_weight"]], **changes,
    )  # fmt: skip


def moments_of(objective, case):
    v = case["v_theta"].to(F64, copy=True).requires_grad_()
    others = {"reference": case["v_ref"].to(F64), "trust": case["v_ema"].to(F64)}
    return matching_of(objective.needs, v, case["x0"].to(F64), case["eps"].to(F64), case["t"], others), v


def advantages_of(case):
    limit = case.scalars["adv_clip_max"]
    return case["advantages"].double().clamp(-limit, limit).repeat(case.scalars["T"])


def check(case, loss, metrics, v):
    loss.mean().backward()
    case.check("policy_loss", metrics["policy_loss"].mean())
    case.check("kl", metrics["kl"].mean())
    case.check("kl_ema", metrics["kl_trust"].mean())
    case.check("loss", loss.mean())
    case.check("grad_v_theta", v.grad)


@pytest.mark.parametrize("name", ON_POLICY)
def test_published_loss_and_gradient_on_policy_are_met(golden, name):
    case = golden("awm_loss", name)
    objective = objective_of(case)
    moments, v = moments_of(objective, case)
    check(case, *objective(moments, advantages_of(case)), v)


def test_published_loss_with_an_active_clip_is_met(golden):
    """The case stores the old log-likelihood; the old error that has it is put in as a gain."""
    case = golden("awm_loss", "awm_ghuber_offpolicy_clip")
    objective = objective_of(case, ratio="old")
    moments, v = moments_of(objective, case)
    p, t = objective.power, case["t"].double()
    old_error = (-case["logp_old"].double().flatten() * p / t + 1e-10**p) ** (1 / p) - 1e-10
    off_policy = type(moments)(**{**vars(moments), "gain_old": moments.e2 - old_error})
    loss, metrics = objective(off_policy, advantages_of(case))
    torch.testing.assert_close(metrics["ratio"], case["ratio"].double().flatten(), rtol=0, atol=1e-11)
    assert metrics["clipped"].any() and not metrics["clipped"].all()
    check(case, loss, metrics, v)


def test_the_published_sum_over_times_first_is_the_sample_level(golden):
    case = golden("awm_loss", "awm_ghuber_sumfirst_elbo")
    objective = objective_of(case, level="sample")
    moments, v = moments_of(objective, case)
    samples = torch.arange(case.scalars["B"]).repeat(case.scalars["T"])
    advantage = advantages_of(case)
    means = unit_means(objective.unit_score(moments, advantage), samples, case.scalars["B"])
    loss, metrics = objective(moments.with_unit_mean(means), advantage)
    case.check("ratio", metrics["ratio"][: case.scalars["B"]])
    check(case, loss, metrics, v)


def test_a_sample_level_ratio_has_the_gradient_of_the_mean_log_ratio():
    """Against one graph: PPO on exp of the mean over a sample's times, with a clip that stops one of the two."""
    generator = torch.Generator().manual_seed(0)
    x0, eps, off, move = torch.randn(4, 6, 3, 4, 4, dtype=F64, generator=generator)
    v_old, t = eps - x0 + off, torch.rand(6, dtype=F64, generator=generator)
    samples, advantage = torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([4.0] * 3 + [-4.0] * 3, dtype=F64)
    objective = AWM(ratio="old", level="sample", clip_range=0.01, kl_weight=0.0, trust_weight=0.0)
    v = (v_old + 0.1 * move).requires_grad_()
    moments = matching_of(objective.needs, v, x0, eps, t, {"old": v_old})
    means = unit_means(objective.unit_score(moments, advantage), samples, 2)
    loss, metrics = objective(moments.with_unit_mean(means), advantage)
    (found,) = torch.autograd.grad(loss.mean(), v)

    w = v.detach().clone().requires_grad_()
    delta = -objective.discrepancy.difference(*pair(matching_of(objective.needs, w, x0, eps, t, {"old": v_old})), t)
    ratio = torch.stack([delta[:3].mean(), delta[3:].mean()]).exp()
    scaled = advantage[[0, 3]] / 5
    whole = torch.maximum(-scaled * ratio, -scaled * ratio.clamp(0.99, 1.01))
    (expected,) = torch.autograd.grad(whole.mean(), w)
    torch.testing.assert_close(loss.mean(), whole.mean(), rtol=1e-12, atol=0)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-15)
    assert metrics["clipped"].view(2, 3).mean(1).tolist() in ([0, 1], [1, 0])


def pair(moments):
    return moments.e2, moments.gain_old


def test_on_policy_and_old_agree_where_the_policies_are_equal():
    generator = torch.Generator().manual_seed(0)
    x0, eps, off = torch.randn(3, 4, 3, 4, 4, dtype=F64, generator=generator)
    t, advantage = torch.rand(4, dtype=F64, generator=generator), torch.tensor([1.0, -2.0, 0.0, 3.0], dtype=F64)
    gradients = []
    for ratio in ("on_policy", "old"):
        objective = AWM(ratio=ratio, kl_weight=0.0, trust_weight=0.0)
        v = (eps - x0 + off).requires_grad_()
        moments = matching_of(objective.needs, v, x0, eps, t, {"old": v.detach()} if ratio == "old" else {})
        objective(moments, advantage)[0].sum().backward()
        gradients.append(v.grad)
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-15)


def test_terms_of_weight_zero_read_no_velocity():
    assert AWM(kl_weight=0.0, trust_weight=0.0).needs.velocities == frozenset()
    assert AWM().needs.velocities == {"reference", "trust"}
    assert AWM(ratio="old").needs.velocities == {"old", "reference", "trust"}


@pytest.mark.parametrize(
    "wrong",
    [
        {"weighting": "sqrt"}, {"ratio": "new"}, {"level": "step"}, {"penalty": "t"}, {"power": 0}, {"adv_range": 0},
        {"clip_range": 0}, {"kl_weight": -1}, {"trust_weight": -1},
    ],
)  # fmt: skip
def test_wrong_fields_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        AWM(**wrong)
