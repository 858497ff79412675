"""What every objective keeps, whatever its formula: a new file in `flowrl_img/objectives` is found and tested."""

from __future__ import annotations

import pytest
import torch
from objective_cases import Batch, batch, likelihood, loss_and_gradient, moments_of

from flowrl_img import plugins

# Further settings of built-in objectives, where the default leaves a term out.
OPTIONS = {
    "flow_grpo": [
        {"kl_weight": 0.1},
        {"clip_range": [0.1, 0.2]},
        {"log_prob": "square"},
        {"ratio": "guard", "time_weight": "inverse_dt"},
    ],
    "tempflow_grpo": [{"kl_weight": 0.1, "kappa": 2.25}],
    "nft": [{"scale": "published", "beta": 0.1}, {"mode": "binary"}],
    "awm": [
        {"ratio": "old", "clip_range": 0.5},
        {"level": "sample", "ratio": "old"},
        {"weighting": "t2", "penalty": "elbo"},
    ],
    "dgpo": [{"compare_with": "old"}, {"clip_range": None, "scale": "published"}, {"clip_kl": True}],
    "ddpo": [{"form": "score"}],
    "sft": [{"kl_weight": 0.1, "weighting": "ghuber"}],
}
# Zero advantage means r = 1/2: no force at the old policy, and a pull back to it elsewhere.
PULLS_AT_ZERO_ADVANTAGE = {"nft"}
IGNORES_NEGATIVE = {"sft"}

CASES = [
    pytest.param(
        plugins.build("objectives", {"name": name, **options}), id="-".join([name, *map(str, options.values())])
    )
    for name in plugins.available("objectives")
    for options in [{}, *OPTIONS.get(name, [])]
]
every = pytest.mark.parametrize("objective", CASES)


def equal_policies(points: Batch) -> Batch:
    v = points.latents["v"]
    return points.having(old=v, trust=v, reference=v)


@every
def test_loss_gradient_and_metrics_are_finite_one_a_row(objective):
    loss, gradient, metrics = loss_and_gradient(objective, batch(objective))
    assert loss.shape == (12,)
    assert loss.isfinite().all() and gradient.isfinite().all()
    for name, value in metrics.items():
        assert value.shape == (12,), name
        assert value.isfinite().all(), name
        assert not value.requires_grad, name


@every
def test_the_logged_parts_add_up_to_the_loss_that_is_differentiated(objective):
    loss, _, metrics = loss_and_gradient(objective, batch(objective))
    total = metrics["policy_loss"]
    for name, weight in objective.penalties.items():
        assert metrics[name].abs().max() > 0, name
        total = total + weight * metrics[name]
    assert torch.equal(total, loss)


@every
def test_zero_advantage_gives_no_force_where_all_policies_are_equal(objective):
    points = equal_policies(batch(objective)).having(advantage=torch.zeros(12))
    _, gradient, _ = loss_and_gradient(objective, points)
    assert gradient.abs().max() < 1e-9  # NFT's two branches cancel to rounding, all others are 0


@every
def test_zero_advantage_gives_zero_policy_gradient_away_from_the_old_policy(objective):
    points = batch(objective)
    v = points.latents["v"]
    points = points.having(advantage=torch.zeros(12), reference=v, trust=v)  # penalties are at their minimum
    _, gradient, _ = loss_and_gradient(objective, points)
    if objective.name in PULLS_AT_ZERO_ADVANTAGE:
        towards_old = (gradient * (v - points.latents["old"])).sum()
        assert towards_old > 0
    else:
        assert gradient.abs().max() == 0


@every
def test_equal_policies_have_ratio_one_and_penalties_zero(objective):
    _, _, metrics = loss_and_gradient(objective, equal_policies(batch(objective)))
    if "log_ratio" in metrics:
        assert metrics["log_ratio"].abs().max() == 0
    if "ratio" in metrics:
        assert (metrics["ratio"] == 1).all()
    for name in objective.penalties:
        assert metrics[name].abs().max() == 0, name


def stepped(objective, points: Batch) -> torch.Tensor:
    """The likelihood of every row after a small step down its own gradient."""
    _, gradient, _ = loss_and_gradient(objective, points)
    scale = 1e-2 / gradient.abs().max().clamp(min=1e-12)
    return likelihood(objective, points, points.latents["v"] - scale * gradient)


@every
def test_a_step_raises_the_likelihood_of_good_rows_and_lowers_that_of_bad(objective):
    points = equal_policies(batch(objective))
    change = stepped(objective, points) - likelihood(objective, points, points.latents["v"])
    assert (change[points.advantage > 0] > 0).all()
    bad = change[points.advantage < 0]
    assert (bad == 0).all() if objective.name in IGNORES_NEGATIVE else (bad < 0).all()


@every
@pytest.mark.parametrize("row", [1, 6])
def test_raising_the_advantage_of_one_row_raises_its_likelihood(objective, row):
    points = equal_policies(batch(objective))
    raised = points.advantage.clone()
    raised[row] = 1.0
    low, high = (stepped(objective, p)[row] for p in (points.having(-points.advantage.abs()), points.having(raised)))
    assert high > low


@every
def test_permuting_rows_permutes_losses_and_gradients(objective):
    points = batch(objective)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(3))
    loss, gradient, _ = loss_and_gradient(objective, points)
    shuffled, turned, _ = loss_and_gradient(objective, points.rows(order))
    torch.testing.assert_close(shuffled, loss[order], rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(turned, gradient[order], rtol=1e-6, atol=1e-9)


@every
def test_micro_batches_of_whole_units_add_up_to_the_gradient_of_all(objective):
    """The rows are at mixed times throughout."""
    points = batch(objective)
    assert len(points.steps.unique()) > 1
    _, whole, _ = loss_and_gradient(objective, points)
    size = 1 if objective.needs.unit == "row" else 4
    parts = [loss_and_gradient(objective, points.rows(slice(k, k + size)))[1] for k in range(0, 12, size)]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-5, atol=1e-8)


@every
def test_packed_latents_give_the_same_loss(objective):
    points = batch(objective)
    loss, gradient, _ = loss_and_gradient(objective, points)
    packed, flat, _ = loss_and_gradient(objective, points.packed())
    # The fused means sum the elements in another order.
    torch.testing.assert_close(packed, loss, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(flat, gradient.flatten(2).transpose(1, 2), rtol=1e-5, atol=1e-8)


@every
@pytest.mark.parametrize("shape", [(8, 4), (16,), (3, 2, 4, 4)])
def test_latents_of_any_rank_are_accepted(objective, shape):
    loss, gradient, _ = loss_and_gradient(objective, batch(objective, shape=shape))
    assert loss.shape == (12,)
    assert gradient.shape == (12, *shape)


@every
def test_moments_far_from_the_old_policy_stay_finite(objective):
    loss, gradient, _ = loss_and_gradient(objective, batch(objective, spread=30.0))
    assert loss.isfinite().all() and gradient.isfinite().all()


@every
def test_only_the_velocities_that_are_asked_for_are_read(objective):
    points = batch(objective)
    asked = set(objective.needs.velocities) | ({"old"} if not objective.needs.matching else set())
    noise = {name: torch.full_like(points.latents["v"], torch.nan) for name in {"old", "trust", "reference"} - asked}
    loss, _, _ = loss_and_gradient(objective, points)
    blind, _, _ = loss_and_gradient(objective, points.having(**noise))
    assert torch.equal(loss, blind)


@every
def test_an_objective_that_scores_units_refuses_to_work_without_their_mean(objective):
    points = batch(objective)
    moments = moments_of(objective, points, points.latents["v"])
    if objective.needs.unit == "group":
        with pytest.raises(ValueError, match="unit_mean"):
            objective(moments.with_unit_mean(None), points.advantage)
    else:
        objective(moments, points.advantage)
