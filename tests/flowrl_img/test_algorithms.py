"""Every algorithm on the one loop, with the tiny model: what it draws, evaluates, stores and updates."""

from dataclasses import replace

import pytest
import torch

from flowrl_img.validation import validate

REWARD = [{"name": "sample_rewards:brightness"}]
MATCHING = {"matching": {"times": {"name": "grid", "count": 2}}}
ALGORITHMS = {
    "flow_grpo": {"objective": {"kl_weight": 0.1}},
    "flow_grpo, guidance": {"objective": {"kl_weight": 0.1}, "rollout": {"guidance": 3.0}},
    "flow_grpo, guard": {"objective": {"ratio": "guard", "time_weight": "inverse_dt"}},
    "flow_grpo, forked": {
        "rollout": {"kind": "anchor_fork", "branches": 2, "window": {"size": 1, "schedule": "fixed"}}
    },
    "tempflow_grpo": {
        "objective": {"name": "tempflow_grpo", "clip_range": 1e-2},
        "rollout": {"kind": "anchor_fork", "branches": 2},
    },
    "nft": {"objective": {"name": "nft", "beta": 0.3}, "rollout": {"policy": "old"}, **MATCHING},
    "nft, full": {"objective": {"name": "nft"}, "weights": {"kind": "full"}, **MATCHING},
    "awm": {"objective": {"name": "awm", "ratio": "old", "level": "sample", "clip_range": 0.1}, **MATCHING},
    "awm, on policy": {"objective": {"name": "awm"}, "rollout": {"solver": {"name": "sa"}}, **MATCHING},
    "dgpo": {"objective": {"name": "dgpo"}, **MATCHING},
    "dgpo, guidance": {
        "objective": {"name": "dgpo", "reference_guidance": 3.0},
        "rollout": {"guidance": 3.0, "solver": {"name": "heun"}},
        **MATCHING,
    },
    "ddpo": {"objective": {"name": "ddpo"}, "advantage": {"baseline": "history"}},
    "sft": {"objective": {"name": "sft"}, **MATCHING},
    "online_dpo": {"objective": {"name": "online_dpo"}, **MATCHING},
}
every = pytest.mark.parametrize("name", ALGORITHMS)


@pytest.fixture
def trainer_of(tiny_trainer):
    """trainer_of(name, **sections): one rollout, one update, brightness as the reward."""

    def make(name, **sections):
        chosen = ALGORITHMS[name]
        merged = {key: {**chosen.get(key, {}), **sections.get(key, {})} for key in {*chosen, *sections}}
        run = {"rollouts": 1, "updates_per_rollout": 1, "micro_batch": 8, **merged.get("run", {})}
        return tiny_trainer(rewards=REWARD, **{**merged, "run": run})

    return make


@every
def test_a_run_makes_the_calls_and_holds_the_latents_of_its_plan_and_finds_what_it_drew(trainer_of, name):
    trainer = trainer_of(name)
    plan = validate(trainer.config)
    scored = trainer.collect(0)
    drawn = scored.rollout
    assert trainer.model.calls == plan.sampling_evaluations
    assert len(drawn.leaves.samples) == plan.images
    held = len(drawn.leaves.latents)
    if drawn.edges is not None:  # only what is trained is stored
        held += len(drawn.edges.states) + len(drawn.edges.v_old)
    assert held == plan.peak_latents_per_process
    (update,) = trainer.train_on(scored)
    assert trainer.model.calls == plan.rollout_evaluations
    checks = {key: value for key, value in update.metrics.items() if key.startswith("check_")}
    assert checks.get("check_ratio_error", 0.0) <= 1e-6
    assert checks.get("check_distance", 0.0) <= 1e-8
    assert update.metrics["grad_norm"] > 0


@pytest.mark.parametrize("name", ["flow_grpo", "tempflow_grpo", "nft", "awm", "dgpo"])
def test_a_guided_run_of_several_updates_makes_the_forward_passes_of_its_plan(trainer_of, name):
    """Counted at the network itself, with gradient and without. Clean samples train the conditional branch alone."""
    run = {"updates_per_rollout": 2, "rollouts": 2, "micro_batch": 5}
    trainer = trainer_of(name, rollout={"guidance": 3.0}, run=run)
    plan = validate(trainer.config)
    seen = {True: 0, False: 0}

    def count(module, args, kwargs):
        seen[torch.is_grad_enabled()] += len(kwargs["hidden_states"])

    trainer.model.network.register_forward_pre_hook(count, with_kwargs=True)
    assert len(list(trainer.run())) == plan.updates == 4
    assert seen[True] == 2 * plan.training_evaluations
    assert seen[True] + seen[False] == 2 * plan.rollout_evaluations
    assert plan.sampling_evaluations % 2 == 0
    branches = 2 if trainer.objective.needs.guided else 1
    assert plan.training_evaluations == branches * plan.updates_per_rollout * plan.points_per_update // (
        2 if name == "tempflow_grpo" else 1
    )


@pytest.mark.parametrize("window", [{}, {"low": 2, "high": 8}])
def test_objectives_on_clean_samples_take_one_step_and_are_not_bound_to_the_window(tiny_trainer, window):
    times = {"times": {"name": "grid", "count": 1}}
    trainer = tiny_trainer(objective={"name": "nft"}, rollout={"steps": 1, "window": window}, matching=times)
    validate(trainer.config)
    assert [update.update for update in trainer.run()] == [1, 2, 3, 4]


def gradient(trainer) -> torch.Tensor:
    trainer._zero_grad()
    trainer.accumulate(trainer.points(trainer.collect(0)), 0)
    return torch.cat([p.grad.flatten() for p in trainer.parameters])


@every
def test_micro_batches_change_the_gradient_by_rounding_alone(trainer_of, name):
    whole = gradient(trainer_of(name, run={"micro_batch": 1000}))
    parts = gradient(trainer_of(name, run={"micro_batch": 4}))
    assert whole.abs().max() > 0
    assert (parts - whole).norm() <= 1e-4 * whole.norm()


@pytest.mark.parametrize("name", ["tempflow_grpo", "nft", "awm", "dgpo", "ddpo"])
def test_the_same_seed_gives_the_same_run(trainer_of, name):
    runs = [[u.metrics for u in trainer_of(name, run={"rollouts": 2}).run()] for _ in range(2)]
    assert runs[0] == runs[1]


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != "dgpo, guidance"])
def test_equal_rewards_give_no_gradient(tiny_trainer, name):
    """From a new adapter on: current, old, trust and reference are equal, so the penalties have no gradient either.

    But where the reference is guided and the trained branch is not.
    """
    chosen = {key: value for key, value in ALGORITHMS[name].items() if key != "advantage"}
    trainer = tiny_trainer(
        random_lora=False, rewards=[{"name": "sample_rewards:constant"}],
        **{**chosen, "run": {"rollouts": 1, "updates_per_rollout": 1, "micro_batch": 8}},
    )  # fmt: skip
    (update,) = trainer.run()
    assert update.metrics["grad_norm"] < 1e-7
    assert update.metrics["loss"] == pytest.approx(update.metrics.get("policy_loss", 0.0), abs=1e-6)


def test_updates_of_a_group_objective_hold_whole_groups(trainer_of):
    trainer = trainer_of("dgpo", run={"updates_per_rollout": 2, "rollouts": 1})
    scored = trainer.collect(0)
    points = trainer.points(scored)
    for part in (0, 1):
        groups = {scored.rollout.leaves.samples[row // 2].group for row in points.rows(part).tolist()}
        assert len(groups) == 1
        for batch in points.micro_batches(part):
            assert batch.units == 1
            assert len({row % 2 for row in batch.rows.tolist()}) == 1  # one time each
            assert len(batch.rows) == 4


def test_updates_of_a_forked_rollout_hold_whole_paths(trainer_of):
    trainer = trainer_of("tempflow_grpo", run={"updates_per_rollout": 2})
    scored = trainer.collect(0)
    points = trainer.points(scored)
    trunks = []
    for part in (0, 1):
        leaf = scored.rollout.edges.leaf[torch.isin(scored.rollout.edges.at_v, points.rows(part))]
        trunks.append({scored.rollout.leaves.samples[k].trunk for k in leaf.tolist()})
    assert not trunks[0] & trunks[1]
    assert [len(t) for t in trunks] == [2, 2]


def test_successors_of_one_state_are_compared_with_each_other_and_evaluated_once(trainer_of):
    trainer = trainer_of("tempflow_grpo")
    scored = trainer.collect(0)
    edges, samples = scored.rollout.edges, scored.rollout.leaves.samples
    assert len(edges) == 2 * len(edges.v_old)
    for row in range(len(edges.v_old)):
        here = (edges.at_v == row).nonzero().flatten()
        assert len(here) == 2
        assert len({samples[k].group for k in edges.leaf[here].tolist()}) == 1
        assert edges.at_t[here].unique().numel() == 1
        assert edges.at_s[here].unique().numel() == 2
        assert scored.advantage[edges.leaf[here]].sum().abs() < 1e-6
    before = trainer.model.calls
    list(trainer.train_on(scored))
    assert trainer.model.calls - before == len(edges.v_old)


def test_a_forked_picture_is_the_independent_one_that_is_stochastic_at_its_step_alone(trainer_of):
    """Up to the noise, which is keyed by the name of the fork."""
    from flowrl_img import seeds
    from flowrl_img.rollout import SDE_SEED

    trainer = trainer_of("tempflow_grpo")
    drawn = trainer.collect(0).rollout
    edges, table = drawn.edges, drawn.table
    rows = (slice(None), None, None, None)
    mean = table.A[edges.step][rows] * edges.states[edges.at_t] + table.B[edges.step][rows] * edges.v_old[edges.at_v]
    z = (edges.states[edges.at_s] - mean) / table.std[edges.step][rows]
    names = [drawn.leaves.samples[k].id for k in edges.leaf.tolist()]
    keys = [seeds.key(0, SDE_SEED, name, step) for name, step in zip(names, edges.step.tolist(), strict=True)]
    torch.testing.assert_close(z.float(), seeds.normal(keys, (4, 8, 8)), rtol=0, atol=1e-3)


def test_old_and_reference_share_one_pass(trainer_of):
    trainer = trainer_of("nft")
    scored = trainer.collect(0)
    passes = []
    handle = trainer.model.network.register_forward_pre_hook(
        lambda module, args, kwargs: passes.append((len(kwargs["hidden_states"]), torch.is_grad_enabled())),
        with_kwargs=True,
    )
    list(trainer.train_on(scored))
    handle.remove()
    assert passes == [(16, False), (8, True)] * 2


def test_shared_noise_and_times_are_those_of_the_group(trainer_of, monkeypatch):
    from flowrl_img import matching

    trainer = trainer_of("dgpo")
    points = trainer.points(trainer.collect(0))
    samples = points.samples
    for a, b in ((0, 1), (0, 3)):
        assert samples[a].group == samples[b].group
        assert points._noise_key(a, 1) == points._noise_key(b, 1)
        assert torch.equal(points.times[a], points.times[b])
    assert points._noise_key(0, 0) != points._noise_key(4, 0)
    assert points._noise_key(0, 0) != points._noise_key(0, 1)
    own = trainer_of("nft")
    own = own.points(own.collect(0))
    assert isinstance(own, matching.Matching)
    assert own._noise_key(0, 1) != own._noise_key(1, 1)
    drawn = {tuple(t.tolist()) for t in own.times}
    assert len(drawn) > 1


def test_rollouts_use_the_policy_that_was_asked_for_and_losses_the_current_weights(trainer_of):
    trainer = trainer_of("nft", run={"rollouts": 3}, rollout={"policy": "old", "policy_from": 2})
    seen = []
    use = trainer.weights.use
    trainer.weights.use = lambda name: seen.append(name) or use(name)
    list(trainer.run())
    drawing = [name for name in seen if name in ("current", "old")]
    # Shared passes enter "old" beside the reference; the first two rollouts draw with the current weights.
    assert drawing.count("current") == 2
    assert trainer.policy == "old"


def test_old_follows_after_the_rollout_and_before_the_last_update_is_told(trainer_of):
    trainer = trainer_of("nft", run={"rollouts": 2, "updates_per_rollout": 2})
    for update in trainer.run():
        same = all(torch.equal(a, b) for a, b in zip(trainer.weights.sets["old"], trainer.parameters, strict=True))
        assert same == (update.metrics["update_of_rollout"] == 1)
        assert trainer.rollout == update.rollout + same


def test_the_best_picture_of_each_group_is_trained_on(trainer_of):
    trainer = trainer_of("sft")
    scored = trainer.collect(0)
    assert scored.kept.sum() == 2
    for k in scored.kept.nonzero().flatten().tolist():
        group = scored.rollout.leaves.samples[k].group
        mates = [j for j, s in enumerate(scored.rollout.leaves.samples) if s.group == group]
        assert scored.advantage[k] == scored.advantage[mates].max()
    pair = trainer_of("online_dpo").collect(0)
    assert pair.kept.view(2, 4).sum(1).tolist() == [2, 2]
    assert (pair.advantage[pair.kept].view(2, 2).sign().sum(1) == 0).all()


@pytest.mark.parametrize("best", [2, 4, 9])
def test_no_more_of_the_best_are_drawn_than_are_better_than_their_baseline(trainer_of, best):
    trainer = trainer_of("sft", objective={"best": best})
    scored = trainer.collect(0)
    wanted = [min(best, int((row > 0).sum())) for row in scored.advantage.view(2, 4)]
    assert scored.kept.view(2, 4).sum(1).tolist() == wanted
    assert (scored.advantage[scored.kept] > 0).all()
    before = trainer.model.calls
    list(trainer.train_on(scored))
    assert trainer.model.calls - before == 2 * sum(wanted) <= validate(trainer.config).training_evaluations


def test_an_update_in_which_nothing_is_trained_is_told_like_any_other(tiny_trainer):
    from flowrl_img.live import Live

    rewards = [{"name": "sample_rewards:constant"}]
    trainer = tiny_trainer(rewards=rewards, **ALGORITHMS["online_dpo"])
    live = Live(trainer.config, enabled=True)
    updates = list(trainer.run())
    for update in updates:
        live.update(update)
    live.close()
    assert [update.metrics["loss"] for update in updates] == [0.0] * 4


def test_a_process_never_evaluates_more_rows_at_once_than_a_micro_batch(trainer_of):
    """Three pictures over two processes are two and one; two such groups are not always three and three."""
    from flowrl_img.matching import Matching
    from flowrl_img.micro_batch import Parts

    trainer = trainer_of("dgpo", rollout={"groups": 4, "group_size": 3}, run={"micro_batch": 3})
    scored = trainer.collect(0)
    groups = list(dict.fromkeys(s.group for s in scored.everything))
    dealt = torch.arange(12) % 2 == 0  # what the first of two processes has
    chosen = (groups[0], groups[2])
    mine = dealt & torch.tensor([s.group in chosen for s in scored.everything])
    trainer.processes.count = 2
    points = Matching(trainer, replace(scored, kept=mine, kept_groups=chosen), Parts(dict.fromkeys(groups, 0), "group"))
    assert mine.sum() == 4
    assert [len(batch.rows) for batch in points.micro_batches(0)] == [2, 2] * 2


@pytest.mark.parametrize("name", ["flow_grpo", "nft", "dgpo", "awm"])
def test_pictures_without_a_score_are_not_trained_on(trainer_of, tiny_trainer, name):
    run = {"rollouts": 1, "updates_per_rollout": 1, "micro_batch": 8}
    rollout = {**ALGORITHMS[name].get("rollout", {}), "groups": 4}
    trainer = tiny_trainer(
        rewards=[{"name": "sample_rewards:broken_for_rings", "on_failure": "mask", "failure_budget": 1.0}],
        **{**ALGORITHMS[name], "run": run, "rollout": rollout},
    )
    scored = trainer.collect(0)
    rings = ["ring" in trainer.prompts.texts[s.prompt] for s in scored.rollout.leaves.samples]
    assert sum(rings) == 4
    assert scored.kept.tolist() == [not ring for ring in rings]
    points = trainer.points(scored)
    assert points.count(points.rows(0)) == 12 * (3 if name == "flow_grpo" else 2)
    (update,) = trainer.train_on(scored)
    assert update.metrics["invalid"] == 4


def test_several_rewards_are_combined_as_asked(tiny_trainer):
    rewards = [{"name": "sample_rewards:brightness", "weight": 1.0}, {"name": "jpeg", "weight": 0.01}]
    found = {}
    for how in ("sum", "advantage_sum", "gdpo"):
        trainer = tiny_trainer(rewards=rewards, aggregate=how)
        scored = trainer.collect(0)
        found[how] = scored.advantage
        assert {"reward/sample_rewards:brightness", "reward/jpeg"} <= scored.metrics.keys()
    assert not torch.allclose(found["sum"], found["advantage_sum"])
    ratio = found["gdpo"] / found["advantage_sum"]
    torch.testing.assert_close(ratio, ratio[0].expand_as(ratio), rtol=1e-3, atol=0)


def test_an_objective_of_another_distribution_trains_by_its_name(tmp_path, monkeypatch, tiny_trainer):
    (tmp_path / "my_matching.py").write_text(
        "from dataclasses import dataclass\n"
        "from flowrl_img.needs import Needs\n\n\n"
        "@dataclass(frozen=True)\n"
        "class Weighted:\n"
        "    power: float = 1.0\n"
        "    needs = Needs(points='matching', rollouts=('independent',), guided=False)\n\n"
        "    def __call__(self, moments, advantage):\n"
        "        loss = advantage * moments.t ** self.power * moments.e2\n"
        "        return loss, {'policy_loss': loss.detach()}\n"
    )
    facts = tmp_path / "my_matching-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: my-matching\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[flowrl_img.objectives]\nweighted = my_matching:Weighted\n")
    monkeypatch.syspath_prepend(tmp_path)
    trainer = tiny_trainer(objective={"name": "weighted", "power": 2.0}, rewards=REWARD)
    assert validate(trainer.config).training_evaluations == 8 * 3
    assert trainer.objective.power == 2.0
    before = [p.detach().clone() for p in trainer.parameters]
    assert len(list(trainer.run())) == 4
    assert not all(torch.equal(p, q) for p, q in zip(trainer.parameters, before, strict=True))
