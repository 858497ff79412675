import dataclasses
import math

import pytest
import torch
from drawing import pictures_of

from flowrl_img import seeds
from flowrl_img.micro_batch import MicroBatch
from flowrl_img.mismatch import FirstUpdate, NonFiniteError, RolloutMismatchError
from flowrl_img.parallel import Processes

ONE_UPDATE = {"updates_per_rollout": 1}


def gradient(trainer) -> list[torch.Tensor]:
    return [p.grad.clone() for p in trainer.parameters]


def first_gradient(trainer):
    """Gradient of the whole first rollout as one update, without stepping."""
    trainer._zero_grad()
    trainer.accumulate(trainer.points(trainer.collect(0)), 0)
    return gradient(trainer)


@pytest.mark.parametrize("micro_batch", [1, 2, 3, 6, 24])
@pytest.mark.parametrize("guidance", [1.0, 4.5])
def test_every_ratio_is_one_before_the_first_update(tiny_trainer, micro_batch, guidance):
    trainer = tiny_trainer(rollout={"guidance": guidance}, run={"micro_batch": micro_batch, **ONE_UPDATE})
    spread = trainer.accumulate(trainer.points(trainer.collect(0)), 0)
    assert spread["check_ratio_error"] <= 1e-6
    assert spread["check_residual_error"] <= 1e-4
    assert "check_distance" not in spread


@pytest.mark.parametrize("guidance", [1.0, 4.5])
def test_scoring_in_any_order_twice_with_other_rollouts_between_changes_no_bit(tiny_trainer, guidance):
    trainer = tiny_trainer(rollout={"guidance": guidance}, objective={"kl_weight": 0.1})
    scored = trainer.collect(0)
    edges, points = scored.rollout.edges, trainer.points(scored)

    def scores(order):
        found = {}
        for k in order:
            moments = points.predict(MicroBatch(torch.tensor([k]))).moments
            found[k] = torch.cat([moments.e2, moments.dref2, moments.dold2, moments.cross]).detach()
        return torch.stack([found[k] for k in range(len(edges))])

    clean = scores(range(len(edges)))
    assert clean.any()
    for seed, steps in ((1, 7), (2, 2)):
        pictures_of(trainer, scored.everything[:3], num_steps=steps, guidance=2.0, seed=seed, batch=2)
        trainer.collect(seed)
        assert torch.equal(scores(seeds.permutation(len(edges), seed)), clean)


def test_rollout_scoring_and_evaluation_use_one_table_that_later_changes_do_not_reach(tiny_trainer, monkeypatch):
    trainer, seen = tiny_trainer(run=ONE_UPDATE), []
    velocity = type(trainer.model).velocity
    monkeypatch.setattr(
        type(trainer.model), "velocity", lambda self, x, sigma, c: (seen.append(sigma), velocity(self, x, sigma, c))[1]
    )
    grid = torch.tensor([1.0, 0.8, 0.45, 0.2, 0.0], dtype=torch.float64)
    monkeypatch.setattr(type(trainer.model), "sigmas", lambda self, num_steps: grid)
    scored = trainer.collect(0)
    assert torch.equal(scored.rollout.sigmas, grid)
    assert sorted({float(s) for sigma in seen for s in sigma}) == grid[:-1].flip(0).tolist()
    # The table of the rollout is scored, whatever the model says of a grid by then.
    monkeypatch.setattr(type(trainer.model), "sigmas", lambda self, num_steps: grid.flip(0))
    seen.clear()
    spread = trainer.accumulate(trainer.points(scored), 0)
    assert spread["check_ratio_error"] <= 1e-6
    assert sorted({float(s) for sigma in seen for s in sigma}) == grid[:3].flip(0).tolist()


@pytest.mark.parametrize("which", ["x_t", "x_s"])
def test_a_scaled_state_stops_the_run_with_a_named_error(tiny_trainer, which):
    trainer = tiny_trainer()
    scored = trainer.collect(0)
    edges = scored.rollout.edges
    # States are shared between neighbours, so give every edge its own before one side is scaled.
    count = len(edges)
    own = torch.cat([edges.states[edges.at_t], edges.states[edges.at_s]])
    own[:count] *= 1.01 if which == "x_t" else 1.0
    own[count:] *= 1.01 if which == "x_s" else 1.0
    lane = torch.arange(count)
    broken = dataclasses.replace(edges, states=own, at_t=lane, at_s=count + lane)
    before = [p.detach().clone() for p in trainer.parameters]
    with pytest.raises(RolloutMismatchError, match="rollout/train mismatch"):
        list(trainer.train_on(dataclasses.replace(scored, rollout=dataclasses.replace(scored.rollout, edges=broken))))
    assert all(torch.equal(p, q) for p, q in zip(trainer.parameters, before, strict=True))


@pytest.mark.parametrize("what", ["ratio", "residual", "distance"])
def test_a_deviation_that_is_no_number_is_no_proof(what):
    seen = FirstUpdate(smallest_clip=1e-4, low_precision=False)
    getattr(seen, f"note_{what}")(torch.tensor([0.0, math.nan, 0.0]))
    with pytest.raises(RolloutMismatchError):
        seen.verdict(Processes())


def test_accumulated_gradient_equals_the_one_batch_gradient(tiny_trainer):
    whole = first_gradient(tiny_trainer(run={"micro_batch": 1000, **ONE_UPDATE}))
    for micro_batch in (1, 2, 4):
        parts = first_gradient(tiny_trainer(run={"micro_batch": micro_batch, **ONE_UPDATE}))
        for a, b in zip(parts, whole, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * max(float(w.abs().max()) for w in whole))


def test_updates_per_rollout_are_exactly_those_asked_for(tiny_trainer):
    trainer = tiny_trainer(run={"updates_per_rollout": 4, "rollouts": 2})
    updates = list(trainer.run())
    assert [u.update for u in updates] == list(range(1, 9))
    assert [u.rollout for u in updates] == [0] * 4 + [1] * 4


def test_updates_of_one_rollout_train_every_sample_once(tiny_trainer):
    trainer = tiny_trainer(run={"updates_per_rollout": 4})
    scored = trainer.collect(0)
    points = trainer.points(scored)
    parts = [points.rows(k) for k in range(4)]
    seen = torch.cat(parts).sort().values
    assert torch.equal(seen, torch.arange(len(scored.rollout.edges)))
    leaves = [set(scored.rollout.edges.leaf[p].tolist()) for p in parts]
    assert [len(s) for s in leaves] == [2] * 4


def test_first_update_is_on_policy_and_the_second_is_not(tiny_trainer):
    first, second = list(tiny_trainer(run={"rollouts": 1}).run())
    assert first.metrics["max_ratio_error"] <= 1e-6
    assert second.metrics["max_ratio_error"] > 1e-6


def test_the_same_seed_gives_the_same_metrics(tiny_trainer):
    runs = [[(u.update, u.metrics) for u in tiny_trainer().run()] for _ in range(2)]
    assert runs[0] == runs[1]
    other = [(u.update, u.metrics) for u in tiny_trainer(run={"seed": 1}).run()]
    assert other != runs[0]


def test_equal_rewards_move_nothing_but_weight_decay(tiny_trainer):
    trainer = tiny_trainer(rewards=[{"name": "sample_rewards:constant"}], optimizer={"weight_decay": 0.0})
    before = [p.detach().clone() for p in trainer.parameters]
    updates = list(trainer.run())
    assert all(u.metrics["grad_norm"] == 0 for u in updates)
    assert all(u.metrics["flat_groups"] == 2 for u in updates)
    assert all(torch.equal(p, q) for p, q in zip(trainer.parameters, before, strict=True))


def test_kl_alone_pulls_towards_the_reference(tiny_trainer):
    trainer = tiny_trainer(
        rewards=[{"name": "sample_rewards:constant"}], objective={"kl_weight": 1.0},
        optimizer={"lr": 1e-4}, run={"updates_per_rollout": 1, "rollouts": 4},
    )  # fmt: skip
    kl = [u.metrics["kl"] for u in trainer.run()]
    assert kl[0] > 0
    assert kl[-1] < kl[0]


def test_kl_starts_at_exactly_zero_for_a_new_adapter(tiny_trainer):
    trainer = tiny_trainer(random_lora=False, objective={"kl_weight": 1.0})
    first = next(trainer.run())
    assert first.metrics["kl"] == 0
    assert first.metrics["loss"] == pytest.approx(first.metrics["policy_loss"])


def test_a_step_raises_the_log_prob_of_good_samples_and_lowers_that_of_bad(tiny_trainer):
    trainer = tiny_trainer(optimizer={"lr": 2e-4}, run=ONE_UPDATE, objective={"clip_range": 0.5})
    scored = trainer.collect(0)
    points = trainer.points(scored)
    list(trainer.train_on(scored))
    found = [points.predict(batch) for batch in points.micro_batches(0)]
    gain = [(trainer.objective.log_ratio(p.moments) * p.advantage).sum() for p in found]
    assert sum(gain) > 0


def test_an_overflowing_network_changes_no_weight(tiny_trainer):
    trainer = tiny_trainer()
    scored = trainer.collect(0)
    before = [p.detach().clone() for p in trainer.parameters]
    with torch.no_grad():
        trainer.model.network.proj_out.weight.fill_(float("inf"))
    with pytest.raises(NonFiniteError, match="no weight was changed"):
        list(trainer.train_on(scored))
    assert all(torch.equal(p, q) for p, q in zip(trainer.parameters, before, strict=True))


def test_every_process_stops_when_the_network_of_another_overflows(tiny_trainer, monkeypatch):
    trainer = tiny_trainer()
    scored = trainer.collect(0)
    before = [p.detach().clone() for p in trainer.parameters]
    elsewhere = "in torch.float32 at steps [1], micro-batch of sample 0/1/1/2"
    monkeypatch.setattr(
        trainer.processes, "gather", lambda item: [item, elsewhere] if isinstance(item, str) else [item]
    )
    with pytest.raises(NonFiniteError, match=r"steps \[1\], micro-batch of sample 0/1/1/2"):
        list(trainer.train_on(scored))
    assert all(torch.equal(p, q) for p, q in zip(trainer.parameters, before, strict=True))


def test_an_overflowing_network_makes_the_collective_calls_of_a_sound_one(tiny_trainer, monkeypatch):
    matching = {"times": {"name": "grid", "count": 2, "high": 3}, "share": "rollout"}
    trainer = tiny_trainer(
        objective={"name": "dgpo", "beta_dpo": 20.0, "clip_range": 1e-2}, matching=matching, run={"micro_batch": 4}
    )
    points, calls = trainer.points(trainer.collect(0)), []
    monkeypatch.setattr(trainer.processes, "sum_tensor", lambda x: calls.append(tuple(x.shape)) or x)
    trainer.accumulate(points, 0)
    sound = calls.copy()
    assert len(sound) > 1
    calls.clear()
    with torch.no_grad():
        trainer.model.network.proj_out.weight.fill_(float("inf"))
    with pytest.raises(NonFiniteError):
        trainer.accumulate(points, 0)
    assert calls == sound


def test_low_precision_takes_the_old_velocity_in_the_training_layout(tiny_trainer):
    trainer = tiny_trainer(model={"dtype": "bf16"}, run={"micro_batch": 5})
    first, _ = list(trainer.run())[:2]
    assert first.metrics["max_ratio_error"] <= 1e-6
    assert first.metrics["check_ratio_error"] <= 1e-6
    assert first.metrics["layout_ratio_error"] >= 0
    assert {p.dtype for p in trainer.parameters} == {torch.float32}


def test_gradient_checkpointing_gives_the_same_gradient(tiny_trainer):
    plain = first_gradient(tiny_trainer(run=ONE_UPDATE))
    saved = first_gradient(tiny_trainer(model={"gradient_checkpointing": True}, run=ONE_UPDATE))
    assert max(float(g.abs().max()) for g in plain) > 0
    for a, b in zip(saved, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-8)


def test_full_fine_tuning_trains_every_weight(tiny_trainer):
    trainer = tiny_trainer(random_lora=False, weights={"kind": "full"}, optimizer={"lr": 1e-4})
    count = sum(p.numel() for p in trainer.model.network.parameters())
    assert trainer.weights.num_trainable == count
    updates = list(trainer.run())
    assert updates[-1].metrics["grad_norm"] > 0
