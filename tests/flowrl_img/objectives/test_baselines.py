import pytest
import torch
from objective_cases import TABLE, batch, loss_and_gradient

from flowrl_img.objectives.ddpo import DDPO
from flowrl_img.objectives.sft import SFT
from flowrl_img.objectives.surrogate import clip_bounds


@pytest.mark.parametrize("name", ["grpo_logp_clip1e-4", "grpo_logp_clip0.2", "grpo_logp_clip0.1_f32"])
def test_the_published_clipped_surrogate_is_met_from_log_probs(golden, name):
    from flowrl_img.objectives.surrogate import clipped_surrogate, exponential

    case = golden("flow_grpo", name)
    log_p = case["logp_new"].clone().requires_grad_()
    ratio = exponential(log_p - case["logp_old"])
    limit = case.scalars["adv_clip_max"]
    loss, _ = clipped_surrogate(ratio, case["advantages"].clamp(-limit, limit), clip_bounds(case.scalars["clip_range"]))
    loss.mean().backward()
    case.check("ratio", ratio)
    case.check("loss", loss.mean())
    case.check("grad_logp_new", log_p.grad)


def test_the_score_form_is_the_log_density_of_the_step():
    objective = DDPO(form="score")
    points = batch(objective)
    loss, gradient, _ = loss_and_gradient(objective, points)
    x, rows = points.latents, TABLE.rows(points.steps)
    v = x["v"].clone().double().requires_grad_()
    A, B, std = (s[:, None, None, None] for s in (rows.A, rows.B, rows.std))
    law = torch.distributions.Normal(A * x["x_t"].double() + B * v, std)
    log_p = law.log_prob(x["x_s"].double()).mean((1, 2, 3))
    (-points.advantage * log_p).sum().backward()
    torch.testing.assert_close(loss.double(), (-points.advantage * log_p).detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradient.double(), v.grad, rtol=1e-3, atol=1e-5)


def test_both_forms_have_the_same_gradient_on_policy():
    points = batch(DDPO())
    on_policy = points.having(v=points.latents["old"])
    gradients = [loss_and_gradient(DDPO(form=form), on_policy)[1] for form in ("importance", "score")]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-9)


def test_supervised_fine_tuning_matches_good_pictures_alone_whatever_their_advantage():
    points = batch(SFT())
    loss, gradient, metrics = loss_and_gradient(SFT(), points)
    good = points.advantage > 0
    torch.testing.assert_close(loss[good], metrics["matching_error"][good])
    assert gradient[~good].abs().max() == 0
    twice, _, _ = loss_and_gradient(SFT(), points.having(advantage=2 * points.advantage))
    assert torch.equal(twice, loss)


@pytest.mark.parametrize("wrong", [0, -1e-4, (0.0, 0.1), (1.5, 0.1), (0.1, 0.0)])
def test_a_clip_range_that_clips_everything_or_nothing_is_refused(wrong):
    with pytest.raises(ValueError, match="clip_range must be positive"):
        clip_bounds(wrong)


@pytest.mark.parametrize(
    "make", [lambda: SFT(best=0), lambda: SFT(kl_weight=-1), lambda: SFT(weighting="w"), lambda: DDPO(form="f")]
)
def test_wrong_fields_are_refused(make):
    with pytest.raises(ValueError, match="must be"):
        make()
