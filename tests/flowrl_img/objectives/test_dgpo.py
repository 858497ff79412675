import pytest
import torch

from flowrl_img.moments import matching_of, unit_means
from flowrl_img.objectives.dgpo import DGPO
from flowrl_img.objectives.online_dpo import OnlineDPO

F64 = torch.float64
CASES = ["dgpo_b10", "dgpo_b10_clip1e-2", "dgpo_b100_clip1e-2", "dgpo_b100_interleaved_clipkl", "dgpo_b2000_emaref"]


def scored(objective, v, x0, eps, others, advantage, group):
    asked = {name: others[name] for name in objective.needs.velocities}
    moments = matching_of(objective.needs, v, x0, eps, torch.full((len(v),), 0.5), asked)
    means = unit_means(objective.unit_score(moments, advantage), group, int(group.max()) + 1)
    return objective(moments.with_unit_mean(means), advantage)


@pytest.mark.parametrize("name", CASES)
def test_published_loss_and_gradient_are_met(golden, name):
    case = golden("dgpo_loss", name)
    s = case.scalars
    objective = DGPO(
        s["beta_dpo"], s["clip_range"] if s["clip_dsm"] else None, s["beta"],
        compare_with="old" if s["use_ema_ref"] else "reference", clip_kl=s["clip_kl"], scale="published",
    )  # fmt: skip
    v = case["v_theta"].to(F64, copy=True).requires_grad_()
    others = {"old": case["v_old"].double(), "reference": case["v_ref"].double()}
    advantage = case["advantages"].double().clamp(-s["adv_clip_max"], s["adv_clip_max"])
    x0, eps = case["x0"].double(), case["eps"].double()
    loss, metrics = scored(objective, v, x0, eps, others, advantage, case["group_id"])
    loss.mean().backward()
    case.check("dsm", metrics["matching_error"])
    case.check("group_weight_row", metrics["group_weight"])
    case.check("policy_loss", metrics["policy_loss"].mean())
    case.check("kl", metrics["kl"].mean())
    case.check("loss", loss.mean())
    case.check("grad_v_theta", v.grad)
    if s["clip_dsm"]:
        case.check("should_clip", metrics["clipped"])


def tensors(rows, seed=0):
    x0, eps, off, move, other = torch.randn(5, rows, 3, 4, 4, dtype=F64, generator=torch.Generator().manual_seed(seed))
    return x0, eps, eps - x0 + off + 0.3 * move, eps - x0 + off + 0.3 * other


def error(v, x0, eps):
    return (v - (eps - x0)).square().mean((1, 2, 3))


def test_the_loss_is_the_gradient_of_a_log_sigmoid_of_two_groups():
    """-log sigmoid(R+ - R-), R = mean over a part of |A| times minus b (e2 - e2_ref), computed in one graph."""
    x0, eps, v, v_ref = tensors(4)
    advantage = torch.tensor([1.2, -0.4, 0.7, -1.5], dtype=F64)
    v.requires_grad_()
    objective = DGPO(beta_dpo=7.0, clip_range=None, kl_weight=0.0)
    loss, metrics = scored(objective, v, x0, eps, {"reference": v_ref}, advantage, torch.zeros(4, dtype=torch.long))
    (found,) = torch.autograd.grad(loss.mean(), v)
    rewards = -7.0 * advantage.abs() * (error(v, x0, eps) - error(v_ref, x0, eps)) / 4
    better, worse = rewards[advantage > 0].sum(), rewards[advantage <= 0].sum()
    whole = -torch.nn.functional.logsigmoid(better - worse)
    (expected,) = torch.autograd.grad(whole, v)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-16)
    torch.testing.assert_close(metrics["preference_loss"], whole.detach().expand(4), rtol=1e-10, atol=0)


def test_beta_multiplies_the_loss_of_the_paper_and_not_the_published_one():
    x0, eps, v, v_ref = tensors(4)
    advantage, group = torch.tensor([1.0, -1.0, 0.5, -0.5], dtype=F64), torch.zeros(4, dtype=torch.long)
    losses = [
        scored(DGPO(50.0, None, 0.0, scale=scale), v, x0, eps, {"reference": v_ref}, advantage, group)[0]
        for scale in ("paper", "published")
    ]
    torch.testing.assert_close(losses[0], 50 * losses[1])


@pytest.mark.parametrize(
    ("A", "gap", "stopped"), [(1.0, 0.3, True), (1.0, -0.3, False), (-1.0, 0.3, False), (-1.0, -0.3, True)]
)
def test_the_trust_clip_stops_only_what_has_already_moved_its_way(A, gap, stopped):
    """gap: e2_old - e2, positive where the picture is already matched better than by the old weights."""
    x0 = eps = torch.zeros(1, 2, 2, dtype=F64)
    v = torch.ones(1, 2, 2, dtype=F64).requires_grad_()
    old = torch.full((1, 2, 2), (1 + gap) ** 0.5, dtype=F64)
    others, advantage = {"old": old, "reference": old}, torch.tensor([A], dtype=F64)
    loss, metrics = scored(DGPO(1.0, 0.1, 0.0), v, x0, eps, others, advantage, torch.zeros(1, dtype=torch.long))
    loss.sum().backward()
    assert bool(metrics["clipped"]) == stopped
    assert bool((v.grad == 0).all()) == stopped


def test_online_dpo_has_the_gradient_of_its_log_sigmoid():
    x0, eps, v, v_ref = tensors(4)
    pairs, advantage = torch.tensor([0, 0, 1, 1]), torch.tensor([1.3, -0.2, -1.0, 0.1], dtype=F64)
    v.requires_grad_()
    loss, metrics = scored(OnlineDPO(beta=5.0), v, x0, eps, {"reference": v_ref}, advantage, pairs)
    (found,) = torch.autograd.grad(loss.mean(), v)
    gain = error(v, x0, eps) - error(v_ref, x0, eps)
    score = 5.0 * torch.stack([gain[1] - gain[0], gain[2] - gain[3]])
    whole = -torch.nn.functional.logsigmoid(score)
    (expected,) = torch.autograd.grad(whole.mean(), v)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-16)
    torch.testing.assert_close(metrics["dpo_loss"], whole.detach().repeat_interleave(2), rtol=1e-10, atol=0)


def test_velocities_are_read_only_where_a_term_uses_them():
    assert DGPO(kl_weight=0.0, clip_range=None).needs.velocities == {"reference"}
    assert DGPO(kl_weight=0.0, compare_with="old").needs.velocities == {"old"}
    assert DGPO().needs.velocities == {"old", "reference"}


@pytest.mark.parametrize(
    "wrong", [{"beta_dpo": 0}, {"clip_range": 0}, {"kl_weight": -1}, {"compare_with": "ema"}, {"scale": "x"}]
)
def test_wrong_fields_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        DGPO(**wrong)
