"""Rewards as a run asks them: what is recorded, what a failure does, groups, timing."""

import json
import threading

import pytest
import torch
from tiny_models import options

from flowrl_img.config import RewardConfig
from flowrl_img.parallel import Processes
from flowrl_img.recipes import to_yaml
from flowrl_img.rewards import registry
from flowrl_img.rewards.score import InvalidScoreError, score
from flowrl_img.run import run_training

BRIGHT = {"name": "sample_rewards:brightness"}
FLAKY = {"name": "sample_rewards:broken_for_rings"}  # one of the four prompts


def reported(section):
    return RewardConfig.model_validate(section)


def rows(run, name="metrics.jsonl"):
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run"


def test_the_record_alone_rebuilds_the_scores(tiny_config, run):
    rewards = [{"name": "pickscore", **options("pickscore")}, {"name": "jpeg", "quality": 70, "weight": 0.5}, BRIGHT]
    assert run_training(tiny_config(rewards=rewards, run={"rollouts": 1, "updates_per_rollout": 1})) == 0
    record = json.loads((run / "rewards.json").read_text())
    assert list(record) == ["pickscore", "jpeg", "sample_rewards:brightness"]
    images, rest = torch.rand(2, 3, 32, 32), (["a ring", "a star"], [{}, {}], ["a", "b"])
    for section, kept in zip(rewards, record.values(), strict=True):
        fields = {k: v for k, v in section.items() if k not in registry.ASKING}
        first, again = registry.build(fields), registry.load(kept["name"], **kept["options"])
        assert torch.equal(score(first, images, *rest).values, score(again, images, *rest).values)
        assert registry.describe(section, again)["fingerprint"] == kept["fingerprint"]
    stated = record["pickscore"]["fingerprint"]
    assert len(stated["model.sha256"]) == 64 and "224" in stated["preprocessing"] and "torch" in stated["libraries"]
    assert record["jpeg"]["weight"] == 0.5 and "libjpeg" in record["jpeg"]["fingerprint"]["encoder"]


def test_each_reward_is_logged_raw_and_its_time_is_taken(tiny_config, run):
    transformed = {**BRIGHT, "label": "bright", "transforms": ["rank"]}
    assert run_training(tiny_config(rewards=[transformed, {"name": "jpeg", "weight": 0.0}])) == 0
    for row in rows(run):
        assert row["reward"] == pytest.approx(0.5)  # the mean rank
        assert 0.2 < row["reward/bright"] < 0.8 and row["reward/jpeg"] < 0
        assert row["failed/bright"] == row["failed/jpeg"] == 0
        assert row["reward_std/bright"] > 0
    seconds = rows(run)[-1]["seconds"]
    assert 0 <= seconds["scoring/bright"] + seconds["scoring/jpeg"] <= seconds["scoring"]
    held_out = rows(run, "evaluations.jsonl")[-1]
    assert held_out["means"]["reward"] == pytest.approx(held_out["means"]["bright"])  # no rank in an evaluation
    assert held_out["failed"] == {}


def test_a_failed_score_stops_the_run_with_its_reason_and_leaves_a_folder(tiny_config, run, capsys):
    assert run_training(tiny_config(rewards=[FLAKY], rollout={"groups": 4, "group_size": 2})) == 1
    said = capsys.readouterr().out
    assert "error: reward 'sample_rewards:broken_for_rings' could not score 2 of 8 samples" in said
    assert "set on_failure to 'mask'" in said
    assert (run / "checkpoint-000000").is_dir() and (run / "summary.txt").exists()


def test_a_masked_failure_is_left_out_until_the_budget_is_gone(tiny_config, run, capsys):
    masked = {**FLAKY, "label": "flaky", "on_failure": "mask"}
    assert run_training(tiny_config(rewards=[masked], rollout={"groups": 4, "group_size": 2})) == 0
    assert [row["invalid"] for row in rows(run)] == [2.0] * 4 == [row["failed/flaky"] for row in rows(run)]
    assert rows(run, "evaluations.jsonl")[0]["failed"]["reward"] == 1
    poor = {**masked, "failure_budget": 0.006}  # 3 in 500: gone in the second rollout
    config = tiny_config(rewards=[poor], rollout={"groups": 4, "group_size": 2}, run={"folder": str(run) + "2"})
    assert run_training(config) == 1
    assert "could not score 4 of the last 16 samples, more than its budget of 3" in capsys.readouterr().out


def test_a_reward_that_is_only_reported_may_fail_for_good(tiny_config, run, tmp_path):
    config = tiny_config(rewards=[BRIGHT, {**FLAKY, "weight": 0.0, "label": "logged"}])
    assert run_training(config.model_copy(update={"report_rewards": (reported(FLAKY),)})) == 0
    assert rows(run, "evaluations.jsonl")[0]["failed"]["report/sample_rewards:broken_for_rings"] == 1
    assert "report/sample_rewards:broken_for_rings" in json.loads((run / "rewards.json").read_text())


def test_a_saved_configuration_with_reported_rewards_loads_again(tiny_config, tmp_path):
    from flowrl_img import recipes
    from flowrl_img.parts import assemble

    config = tiny_config().model_copy(update={"report_rewards": (reported(BRIGHT),)})
    (tmp_path / "saved.yaml").write_text(to_yaml(config))
    assert list(assemble(recipes.load(str(tmp_path / "saved.yaml"))).report) == ["sample_rewards:brightness"]


def test_a_groupwise_reward_sees_the_whole_group_and_trains(tiny_config, run):
    contest = {"name": "sample_rewards:Contest", "batch_size": 3}
    config = tiny_config(rewards=[contest, {**BRIGHT, "weight": 0.0, "label": "bright"}])
    assert run_training(config) == 0
    assert all(row["reward"] == pytest.approx(3 / 8, abs=1e-6) for row in rows(run))  # 4 rows: (0 + 1 + 2 + 3) / 16
    means = rows(run, "evaluations.jsonl")[0]["means"]
    assert "contest" not in means and means["reward"] == means["bright"]


def test_a_failure_on_another_process_stops_this_one_too(tiny_trainer, monkeypatch):
    trainer = tiny_trainer(rewards=[BRIGHT])
    seen = []

    def gather(self, item):
        seen.append(item)
        return [item, "reward 'x' could not score 1 of 4 samples"] if isinstance(item, str) else [item, item]

    monkeypatch.setattr(Processes, "gather", gather)
    with pytest.raises(InvalidScoreError, match="reward 'x' could not score"):
        trainer.collect(0)
    assert seen == [""]  # nothing else was exchanged on the way


SCALED = {"name": "affine", "scale": 100.0}
BIG = {"name": "sample_rewards:brightness", "label": "big", "transforms": [SCALED]}
SMALL = {"name": "sample_rewards:brightness", "label": "small", "transforms": [{"name": "affine", "scale": -1.0}]}


@pytest.mark.parametrize(("aggregate", "factor"), [("sum", 1.0), ("advantage_sum", -2.0), ("gdpo", -1.0)])
def test_a_large_scale_decides_a_sum_and_weights_decide_advantages(tiny_trainer, aggregate, factor):
    rewards, exact = [BIG, {**SMALL, "weight": 3.0}], {"eps": 1e-9}  # spreads are near 1e-3
    both = tiny_trainer(rewards=rewards, aggregate=aggregate, advantage=exact).collect(0).advantage
    alone = tiny_trainer(rewards=[BIG], advantage=exact).collect(0).advantage
    torch.testing.assert_close(both, factor * alone, rtol=0, atol=1e-3)


def test_the_geometric_mean_is_trained_on(tiny_trainer):
    geometric = tiny_trainer(rewards=[BRIGHT, {**BRIGHT, "label": "again", "weight": 3.0}], aggregate="geometric")
    alone = tiny_trainer(rewards=[BRIGHT])
    torch.testing.assert_close(geometric.collect(0).advantage, alone.collect(0).advantage, rtol=1e-4, atol=1e-4)


def test_scores_are_computed_while_the_next_rollout_is_drawn_by_the_weights_of_then(tiny_trainer, monkeypatch):
    """With overlap, rollout k + 1 is drawn before the updates of rollout k; otherwise nothing changes."""
    from flowrl_img import collect as module

    order, own = [], {name: getattr(module, name) for name in ("roll", "ask")}
    monkeypatch.setattr(module, "roll", lambda *a, **k: order.append(("roll", trainer.update)) or own["roll"](*a, **k))
    monkeypatch.setattr(
        module, "ask", lambda *a: order.append(("ask", threading.current_thread().name[:7])) or own["ask"](*a)
    )
    runs = {"rollouts": 3, "updates_per_rollout": 1}
    trainer = tiny_trainer(rewards=[BRIGHT], run={**runs, "overlap": True})
    updates = list(trainer.run())
    assert [u.rollout for u in updates] == [0, 1, 2]
    assert [entry for entry in order if entry[0] == "roll"] == [("roll", 0), ("roll", 0), ("roll", 1)]
    assert {entry[1] for entry in order if entry[0] == "ask"} == {"scoring"}
    trainer = tiny_trainer(rewards=[BRIGHT], run=runs)
    plain = list(trainer.run())
    assert plain[0].metrics == updates[0].metrics  # the first update is the same; later ones are one rollout stale
    assert plain[2].metrics["reward"] != updates[2].metrics["reward"]


def test_a_failure_while_the_next_rollout_is_drawn_stops_the_run(tiny_config, run, capsys):
    assert (
        run_training(tiny_config(rewards=[FLAKY], rollout={"groups": 4, "group_size": 2}, run={"overlap": True})) == 1
    )
    assert "error: reward 'sample_rewards:broken_for_rings' could not score 2 of 8" in capsys.readouterr().out


def test_overlap_is_refused_where_old_velocities_are_taken_anew(tiny_config):
    from flowrl_img.validation import validate

    with pytest.raises(ValueError, match=r"run\.overlap with model\.dtype = bf16"):
        validate(tiny_config(run={"overlap": True}, model={"dtype": "bf16"}))


def test_an_objective_on_clean_samples_trains_on_the_rollout_drawn_ahead(tiny_trainer, monkeypatch):
    from flowrl_img import collect as module

    drawn, draw = [], module.draw
    monkeypatch.setattr(module, "draw", lambda *a, **k: drawn.append(trainer.update) or draw(*a, **k))
    how = {"objective": {"name": "nft"}, "rewards": [BRIGHT]}
    trainer = tiny_trainer(**how, run={"rollouts": 3, "updates_per_rollout": 1, "overlap": True})
    updates = list(trainer.run())
    assert [u.rollout for u in updates] == [0, 1, 2] and drawn == [0, 0, 1]
    assert not trainer.ahead
