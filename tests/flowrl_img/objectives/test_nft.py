import pytest
import torch

from flowrl_img.moments import matching_of
from flowrl_img.objectives.nft import NFT

F64 = torch.float64


def moments_of(objective, case):
    v = case["v_theta"].to(F64, copy=True).requires_grad_()
    others = {"old": case["v_old"].to(F64), "reference": case["v_ref"].to(F64)}
    others = {name: other for name, other in others.items() if name in objective.needs.velocities}
    return matching_of(objective.needs, v, case["x0"].to(F64), case["eps"].to(F64), case["t"], others), v


CASES = [
    "nft_beta0.1", "nft_beta1.0", "nft_beta1_floor_row", "nft_beta0.1_packed_f32", "nft_positive_only", "nft_binary",
    "nft_theta_eq_old",
]  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_published_loss_and_gradient_are_met(golden, name):
    case = golden("nft_loss", name)
    s = case.scalars
    objective = NFT(s["beta"], s["kl_beta"], s["adv_clip_max"], s["adv_mode"], scale="published")
    moments, v = moments_of(objective, case)
    advantage = case["advantages"].double().clamp(-s["adv_clip_max"], s["adv_clip_max"])
    loss, metrics = objective(moments, advantage)
    loss.mean().backward()
    case.check("r", objective.optimality(advantage))
    case.check("positive_loss", metrics["plus_loss"])
    case.check("negative_loss", metrics["minus_loss"])
    case.check("loss", loss.mean())
    case.check("grad_v_theta", v.grad)
    if s["kl_beta"]:
        case.check("kl", metrics["kl"].mean())


def test_the_form_of_the_paper_differs_from_the_published_one_by_a_constant(golden):
    case = golden("nft_loss", "nft_beta0.1")
    gradients = []
    for scale in ("paper", "published"):
        objective = NFT(0.1, kl_weight=0.0, scale=scale)
        moments, v = moments_of(objective, case)
        objective(moments, case["advantages"].double())[0].sum().backward()
        gradients.append(v.grad)
    torch.testing.assert_close(gradients[1], gradients[0] * 5 / 0.1, rtol=1e-12, atol=0)


@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_at_the_old_policy_the_gradient_is_that_of_advantage_weighted_matching(golden, beta):
    """grad L = A grad [t^2 mse(v, v*) / mean |x0_hat - x0|], in the published scale and without the penalty."""
    case = golden("nft_loss", "nft_theta_eq_old")
    objective = NFT(beta, kl_weight=0.0, scale="published")
    moments, v = moments_of(objective, case)
    advantage = case["advantages"].double().clamp(-5, 5)
    objective(moments, advantage)[0].sum().backward()
    w = case["v_theta"].to(F64, copy=True).requires_grad_()
    error = w - (case["eps"] - case["x0"]).double()
    t = case["t"].double()
    size = (t.view(-1, 1, 1, 1) * error).abs().mean((1, 2, 3)).detach()
    (advantage * t**2 * error.square().mean((1, 2, 3)) / size).sum().backward()
    torch.testing.assert_close(v.grad, w.grad, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("all", [0.0, 0.4, 0.5, 0.6, 1.0]),
        ("positive_only", [0.5, 0.5, 0.5, 0.6, 1.0]),
        ("negative_only", [0.0, 0.4, 0.5, 0.5, 0.5]),
        ("one_only", [0.5, 0.5, 0.5, 0.6, 0.6]),
        ("binary", [0.4, 0.4, 0.5, 0.6, 0.6]),
    ],
)
def test_modes_choose_what_an_advantage_says(mode, expected):
    r = NFT(mode=mode).optimality(torch.tensor([-7.0, -1.0, 0.0, 1.0, 7.0]))
    assert r.tolist() == pytest.approx(expected)


def test_the_reference_is_read_only_with_a_penalty():
    assert NFT(kl_weight=0.0).needs.velocities == {"old"}
    assert NFT().needs.velocities == {"old", "reference"}


@pytest.mark.parametrize("wrong", [{"beta": 0}, {"kl_weight": -1}, {"adv_range": 0}, {"mode": "some"}, {"scale": "x"}])
def test_wrong_fields_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        NFT(**wrong)
