"""GRPO-Guard and TempFlow-GRPO as objectives: what they add to Flow-GRPO is a ratio and a weight of time."""

import pytest
import torch

from flowrl_img.moments import transition_of
from flowrl_img.objectives.flow_grpo import FlowGRPO
from flowrl_img.objectives.tempflow_grpo import TempFlowGRPO
from flowrl_img.samplers.steps.flow_sde import FlowSDE

F64 = torch.float64
GUARD = [
    "guard_s0", "guard_s2", "guard_s5", "guard_s8", "guard_s2_large", "guard_s6_large", "guard_s0_large", "guard_s3_kl",
    "guard_s4_outside_pos", "guard_s4_outside_neg",
]  # fmt: skip


def moments_of(objective, case, trained=9):
    whole = FlowSDE(case.scalars["noise_level"]).coefficients(case["sigmas"].double())
    v = case["v_theta"].to(F64, copy=True).requires_grad_()
    others = {"old": case["v_old"].to(F64), "reference": case["v_ref"].to(F64)}
    moments = transition_of(
        objective.needs, (v, None), 1.0, case["x"].to(F64), case["x_next"].to(F64),
        whole.rows(case["step_index"].long()), others, float(whole.std[:trained].mean()),
    )  # fmt: skip
    return moments, v


@pytest.mark.parametrize("name", GUARD)
def test_published_guard_loss_and_gradient_are_met(golden, name):
    case = golden("guard", name)
    s = case.scalars
    objective = FlowGRPO(s["clip_range"], s["beta"], kl_form="published", ratio="guard", time_weight="inverse_dt")
    moments, v = moments_of(objective, case)
    loss, metrics = objective(moments, case["advantages"].double().clamp(-5, 5))
    loss.mean().backward()
    case.check("ratio", metrics["ratio"])
    case.check("policy_loss", metrics["policy_loss"].mean())
    case.check("loss", loss.mean())
    case.check("grad_v_theta", v.grad)


TEMPFLOW = ["tempflow_sd3_s0", "tempflow_sd3_s3", "tempflow_sd3_s8", "tempflow_flux_s4"]


@pytest.mark.parametrize("name", TEMPFLOW)
def test_published_tempflow_loss_and_gradient_are_met_with_its_constant(golden, name):
    case = golden("tempflow", name)
    s = case.scalars
    objective = TempFlowGRPO(s["clip_range"], s["beta"], kappa=s["kappa"])
    moments, v = moments_of(objective, case)
    loss, metrics = objective(moments, case["advantages"].double().clamp(-5, 5))
    loss.mean().backward()
    case.check("ratio", metrics["ratio"])
    case.check("kl", metrics["kl"].mean() if case["kl"].ndim == 0 else metrics["kl"])
    case.check("policy_loss", metrics["policy_loss"].mean())
    case.check("loss", loss.mean())
    case.check("grad_v_theta", v.grad)


@pytest.mark.parametrize("name", ["tempflow_weights_sd3N10", "tempflow_weights_flux4096N10"])
def test_the_weight_has_mean_one_over_the_trained_steps_and_explains_the_published_constant(golden, name):
    case = golden("tempflow", name)
    s = case.scalars
    table = FlowSDE(s["noise_level"]).coefficients(case["sigmas"].double())
    case.check("std", table.std)
    mean = table.std[: s["trained_steps"]].mean()
    case.check("one_over_mean_std", 1 / mean)
    assert round(float(1 / mean), 2) == s["kappa"]
    weight = (table.std / mean)[: s["trained_steps"]]
    assert weight.mean().item() == pytest.approx(1.0, abs=1e-12)


def test_the_normalised_weight_is_the_default_and_differs_from_the_constant_by_its_rounding(golden):
    case = golden("tempflow", "tempflow_sd3_s3")
    losses = []
    for kappa in (None, 2.25):
        objective = TempFlowGRPO(case.scalars["clip_range"], kappa=kappa)
        moments, _ = moments_of(objective, case)
        losses.append(objective(moments, case["advantages"].double().clamp(-5, 5))[0])
    torch.testing.assert_close(losses[0] / losses[1], torch.full_like(losses[0], 2.2522 / 2.25), rtol=1e-4, atol=0)


def test_tempflow_is_flow_grpo_on_a_forked_rollout_with_the_noise_weight(golden):
    case = golden("tempflow", "tempflow_sd3_s3")
    parts = FlowGRPO(1e-4, 0.004, time_weight="noise"), TempFlowGRPO(1e-4, 0.004)
    losses = [objective(moments_of(objective, case)[0], case["advantages"].double())[0] for objective in parts]
    assert torch.equal(*losses)
    assert set(parts[1].needs.rollouts) == {"anchor_fork"}
    assert {"anchor_fork", "independent"} == set(parts[0].needs.rollouts)


def test_a_constant_without_the_noise_weight_is_refused():
    with pytest.raises(ValueError, match="kappa must be positive and belongs to time_weight = noise"):
        FlowGRPO(kappa=2.25)
    with pytest.raises(ValueError, match="kappa must be positive"):
        TempFlowGRPO(kappa=-1.0)
    with pytest.raises(ValueError, match="clip_range"):
        TempFlowGRPO(clip_range=0)
