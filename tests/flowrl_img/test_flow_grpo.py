import dataclasses
import itertools

import pytest
import torch

from flowrl_img.kernels.logprob import WEIGHTINGS, DeterministicStepError, log_prob
from flowrl_img.kernels.transition import E2, transition_moments
from flowrl_img.objectives.flow_grpo import FlowGRPO
from flowrl_img.samplers.steps.cps import CPS
from flowrl_img.samplers.steps.flow_sde import FlowSDE
from flowrl_img.samplers.steps.table import StepTable
from flowrl_img.types import Moments


def table_of(case) -> StepTable:
    sigmas = case["sigmas"].double()
    return FlowSDE(case.scalars["noise_level"]).coefficients(sigmas).rows(case["step_index"].long())


FULL = ["flowgrpo_full_kl_s2", "flowgrpo_full_kl_s0", "flowgrpo_full_kl_s8_a1.2", "flowgrpo_full_mixed_steps"]


@pytest.mark.parametrize("name", [*FULL, "flowgrpo_packed_flux_kl"])
def test_published_loss_and_gradient_are_met(golden, name):
    case = golden("flow_grpo", name)
    table = table_of(case)
    v = case["v_theta"].double().requires_grad_()
    columns = transition_moments(
        v, None, 1.0, case["x"].double(), case["x_next"].double(), table.A, table.B,
        v_old=case["v_old"].double(), v_ref=case["v_ref"].double(),
    )  # fmt: skip
    objective = FlowGRPO(case.scalars["clip_range"], case.scalars["beta"], kl_form="published")
    limit = case.scalars["adv_clip_max"]
    loss, metrics = objective(Moments.of(columns, table), case["advantages"].clamp(-limit, limit))
    loss.mean().backward()
    case.check("loss", loss.mean())
    case.check("ratio", metrics["ratio"])
    case.check("policy_loss", metrics["policy_loss"].mean())
    case.check("grad_v_theta", v.grad)


def test_the_square_log_prob_on_cps_steps_meets_the_published_loss(golden):
    case = golden("flow_grpo", "flowgrpo_cps")
    table = CPS(case.scalars["noise_level"]).coefficients(case["sigmas"].double()).rows(case["step_index"].long())
    v = case["v_theta"].double().requires_grad_()
    states = (case["x"].double(), case["x_next"].double(), table.A, table.B)
    columns = transition_moments(v, None, 1.0, *states, v_old=case["v_old"].double())
    objective = FlowGRPO(case.scalars["clip_range"], log_prob="square")
    loss, metrics = objective(Moments.of(columns, table), case["advantages"].clamp(-5, 5))
    loss.mean().backward()
    case.check("loss", loss.mean())
    case.check("ratio", metrics["ratio"])
    case.check("grad_v_theta", v.grad)
    case.check("logp_new", WEIGHTINGS["square"].log_prob(columns[:, E2].detach(), table.std))


def test_a_step_without_noise_has_no_density_and_may_have_a_square():
    moments = moments_with(torch.tensor([0.0, 0.1]))
    silent = dataclasses.replace(moments, table=dataclasses.replace(moments.table, std=torch.tensor([1.0, 0.0])))
    with pytest.raises(DeterministicStepError, match="no density"):
        FlowGRPO()(silent, torch.ones(2))
    loss, _ = FlowGRPO(log_prob="square")(silent, torch.ones(2))
    assert loss.isfinite().all()


def test_the_square_log_ratio_is_the_densitys_times_twice_the_variance():
    table = StepTable(*(torch.tensor([x, x]) for x in (1.0, -0.1, 0.5, 0.7, -0.1)))
    moments = Moments(*torch.rand(4, 2, generator=torch.Generator().manual_seed(0)), table)
    density, square = FlowGRPO().log_ratio(moments), FlowGRPO(log_prob="square").log_ratio(moments)
    torch.testing.assert_close(square, 2 * table.std**2 * density)


def test_float32_case_is_met_in_float32(golden):
    case = golden("flow_grpo", "flowgrpo_full_f32")
    table = table_of(case)
    v = case["v_theta"].float().requires_grad_()
    columns = transition_moments(
        v, None, 1.0, case["x"].float(), case["x_next"].float(), table.A, table.B,
        v_old=case["v_old"].float(), v_ref=case["v_ref"].float(),
    )  # fmt: skip
    objective = FlowGRPO(case.scalars["clip_range"], case.scalars["beta"], kl_form="published")
    loss, _ = objective(Moments.of(columns, table), case["advantages"].float().clamp(-5, 5))
    loss.mean().backward()
    case.check("loss", loss.mean())
    case.check("grad_v_theta", v.grad)


@pytest.mark.parametrize("detached", [True, False])
def test_published_guidance_gradients_are_met(golden, detached):
    case = golden("flow_grpo", "grpo_cfg_detached_uncond" if detached else "grpo_cfg_full_grad")
    sigmas = case["sigmas"].double()
    steps = torch.full((len(case["x"]),), case.scalars["step_index"])
    table = FlowSDE(case.scalars["noise_level"]).coefficients(sigmas).rows(steps)
    v_c, v_u = (case[k].double().requires_grad_() for k in ("v_cond", "v_uncond"))
    columns = transition_moments(
        v_c, v_u, case.scalars["guidance_scale"], case["x"].double(), case["x_next"].double(), table.A, table.B,
        detach_uncond=detached,
    )  # fmt: skip
    # The case gives an old log-prob and no old velocity, so the ratio is a difference of log-probs here.
    log_p = log_prob(columns[:, 0], table.std)
    ratio = (log_p - case["logp_old"]).exp()
    clip = case.scalars["clip_range"]
    advantage = case["advantages"].double().clamp(-5, 5)
    torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - clip, 1 + clip)).mean().backward()
    case.check("grad_v_cond", v_c.grad)
    case.check("grad_v_uncond", torch.zeros_like(v_u) if v_u.grad is None else v_u.grad)


def moments_with(log_ratio: torch.Tensor, dref2: float = 0.0) -> Moments:
    """Moments of unit std and B = -1 whose log-ratio is `log_ratio` (through the cross term alone)."""
    rows = len(log_ratio)
    one = torch.ones(rows)
    table = StepTable(one, -one, one, one, -one)
    zero = torch.zeros(rows)
    return Moments(zero, zero + dref2, zero, -log_ratio, table)


@pytest.mark.parametrize("name", ["clip1e-4", "clip0.2", "clip0.1_f32"])
def test_the_published_surrogate_and_its_gradient_are_met_at_given_log_probs(golden, name):
    case = golden("flow_grpo", f"grpo_logp_{name}")
    log_prob_new = case["logp_new"].clone().requires_grad_()
    objective = FlowGRPO(case.scalars["clip_range"])
    loss, metrics = objective(moments_with(log_prob_new - case["logp_old"]), case["advantages"].clamp(-5, 5))
    loss.mean().backward()
    case.check("loss", loss.mean())
    case.check("ratio", metrics["ratio"])
    case.check("grad_logp_new", log_prob_new.grad)


@pytest.mark.parametrize(("advantage", "ratio"), list(itertools.product([-1.0, 1.0], [0.5, 1.0, 1.5])))
def test_gradient_is_zero_exactly_where_the_clip_is_active(advantage, ratio):
    delta = torch.tensor([ratio]).log().requires_grad_()
    loss, metrics = FlowGRPO(0.2)(moments_with(delta), torch.tensor([advantage]))
    loss.sum().backward()
    clipped = (advantage > 0 and ratio > 1.2) or (advantage < 0 and ratio < 0.8)
    assert (delta.grad.item() == 0) == clipped
    assert metrics["clipped"].item() == clipped
    if not clipped:
        assert delta.grad.item() == pytest.approx(-advantage * ratio)


def test_zero_advantage_gives_zero_policy_gradient():
    delta = torch.tensor([0.3, -0.3]).requires_grad_()
    loss, _ = FlowGRPO(0.2)(moments_with(delta), torch.zeros(2))
    loss.sum().backward()
    assert delta.grad.abs().max() == 0


def test_unequal_clip_range_is_low_then_high():
    delta = torch.tensor([1.25, 0.85]).log()
    loss, metrics = FlowGRPO((0.1, 0.3))(moments_with(delta), torch.tensor([1.0, -1.0]))
    assert metrics["clipped"].tolist() == [0, 1]
    torch.testing.assert_close(loss, torch.tensor([-1.25, 0.9]))


def test_huge_log_ratio_stays_finite():
    delta = torch.tensor([200.0, -200.0]).requires_grad_()
    loss, _ = FlowGRPO(0.2)(moments_with(delta), torch.tensor([-1.0, 1.0]))
    loss.sum().backward()
    assert loss.isfinite().all()
    assert delta.grad.isfinite().all()


def test_kl_is_zero_at_the_reference_and_logged_as_it_enters_the_loss():
    delta = torch.zeros(3)
    at_reference, metrics = FlowGRPO(0.2, kl_weight=0.5)(moments_with(delta), torch.zeros(3))
    assert at_reference.abs().max() == 0
    assert metrics["kl"].abs().max() == 0
    away, metrics = FlowGRPO(0.2, kl_weight=0.5)(moments_with(delta, dref2=0.8), torch.zeros(3))
    torch.testing.assert_close(away, 0.5 * metrics["kl"])
    assert metrics["kl"].tolist() == pytest.approx([0.4] * 3)


def test_the_reference_is_needed_only_with_a_kl_weight():
    assert FlowGRPO().needs.velocities == {"old"}
    assert FlowGRPO(kl_weight=0.01).needs.velocities == {"old", "reference"}


@pytest.mark.parametrize(
    "wrong", [{"clip_range": 0}, {"clip_range": -1e-4}, {"kl_weight": -1}, {"kl_form": "k3"}, {"log_prob": "sum"}]
)
def test_wrong_fields_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        FlowGRPO(**wrong)
