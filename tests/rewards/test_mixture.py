"""Rewards side by side: validity, aggregates, transforms, what evaluations keep."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from flowrl_img.rewards import registry
from flowrl_img.rewards.failures import FailureBudget
from flowrl_img.rewards.mixture import Mixture, Part
from flowrl_img.rewards.protocol import RewardBatch, RewardOutput
from flowrl_img.rewards.registry import FunctionReward
from flowrl_img.rewards.score import InvalidScoreError, Scorer, score

NAN = float("nan")


def constant(name: str, *values: float | None) -> Scorer:
    reward = FunctionReward(lambda images, prompts, metadata: list(values), name)
    return Scorer(reward, failures=FailureBudget("mask", share=1.0))


def ask(mixture: Mixture, rows: int = 2) -> RewardOutput:
    return score(mixture, torch.rand(rows, 3, 2, 2), [""] * rows, [{}] * rows, [str(k) for k in range(rows)])


def mix(weights: dict[str, float], aggregate: str = "sum", **values: Any) -> Mixture:
    return Mixture(tuple(Part(constant(name, *values.get(name, ())), w) for name, w in weights.items()), aggregate)


def part(name: str, *transforms: Any, weight: float = 1.0) -> Part:
    sections = [{"name": entry} if isinstance(entry, str) else entry for entry in transforms]
    made = registry.build_part({"name": "sample_rewards:constant", "label": name, "transforms": sections})
    return Part(made.scorer, weight, made.transforms)


def combined(mixture: Mixture, groups: Sequence[str] = (), **columns: list[float]) -> list[float]:
    found = mixture.combine(columns, groups or ["g"] * len(next(iter(columns.values()))))
    assert found.valid.tolist() == [not math.isnan(value) for value in found.values.tolist()]
    return found.values.tolist()


def test_the_sum_is_weighted_and_parts_are_logged_raw() -> None:
    mixture = mix({"a": 0.5, "b": -2.0}, a=(1.0, 2.0), b=(10.0, 0.25))
    out = ask(mixture)
    assert out.values.tolist() == [-19.5, 0.5]
    assert mixture.columns(out) == {"a": [1.0, 2.0], "b": [10.0, 0.25]}
    assert combined(mixture, a=[1.0, 2.0], b=[10.0, 0.25]) == [-19.5, 0.5]


def test_a_row_is_invalid_where_a_weighted_part_failed() -> None:
    out = ask(mix({"a": 1.0, "b": 1.0}, a=(1.0, 2.0), b=(None, 3.0)))
    assert out.valid.tolist() == [False, True]
    assert out.values[0].isnan() and out.values[1] == 5.0
    assert out.details["error"] == ["b: no reason given", None]


def test_a_part_of_weight_zero_is_logged_but_counts_for_nothing() -> None:
    mixture = mix({"a": 1.0, "b": 0.0}, a=(1.0, 2.0), b=(None, 3.0))
    out = ask(mixture)
    assert out.valid.all() and out.values.tolist() == [1.0, 2.0]
    assert out.details["b"][1] == 3.0
    assert combined(mixture, a=[1.0, 2.0], b=[NAN, 3.0]) == [1.0, 2.0]


@pytest.mark.parametrize("weights", [{}, {"a": 0.0}, {"a": NAN}, {"a": math.inf}])
def test_weights_that_make_no_sum_are_errors(weights: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="weight"):
        mix(weights)


def test_two_columns_of_one_name_are_an_error() -> None:
    with pytest.raises(ValueError, match="two rewards are called 'a': give one of them another label"):
        Mixture((Part(constant("a")), Part(constant("a"))))
    Mixture((Part(constant("a")), Part(Scorer(constant("a").reward, "b"))))


def test_the_geometric_mean_is_weighted_and_zero_where_a_part_is() -> None:
    mixture = mix({"a": 1.0, "b": 3.0}, "geometric")
    assert combined(mixture, a=[16.0, 0.0, NAN], b=[1.0, 5.0, 1.0])[:2] == [2.0, 0.0]
    equal = mix({"a": 2.0, "b": 2.0}, "geometric")
    assert combined(equal, a=[2.0], b=[8.0]) == [pytest.approx(4.0)]
    with pytest.raises(InvalidScoreError, match=r"reward 'b' gave -0.5: shift it by the transform 'affine'"):
        combined(mixture, a=[1.0], b=[-0.5])
    with pytest.raises(ValueError, match="weights of 0 or more"):
        mix({"a": 1.0, "b": -1.0}, "geometric")


def test_negative_values_that_are_ranked_are_trained_on_and_have_no_geometric_mean_by_themselves() -> None:
    ranked = registry.build_part({"name": "sample_rewards:constant", "transforms": ["rank"]}).transforms
    mixture = Mixture((Part(constant("a", -2.0, -1.0), 1.0, ranked), Part(constant("b", 1.0, 4.0))), "geometric")
    reasons = ["aggregate geometric has no value for a reward below 0"] * 2
    for asked in (mixture, mixture.held_out()):
        out = ask(asked)
        assert not out.valid.any() and out.details["error"] == reasons
    assert combined(mixture, **mixture.columns(out)) == [0.0, 2.0]


@pytest.mark.parametrize("aggregate", ["advantage_sum", "gdpo"])
def test_aggregates_of_advantages_log_the_sum_and_keep_the_columns(aggregate: str) -> None:
    found = mix({"a": 1.0, "b": 2.0}, aggregate).combine({"a": [1.0, NAN], "b": [3.0, 4.0]}, ["g", "g"])
    assert found.values[0] == 7.0 and found.valid.tolist() == [True, False]
    assert found.columns["a"].isnan().tolist() == [False, True] and found.columns["b"].tolist() == [3.0, 4.0]
    assert found.weights == {"a": 1.0, "b": 2.0} and found.terms.keys() == {"a", "b"} and found.aggregate == aggregate


def test_an_unknown_aggregate_is_refused() -> None:
    with pytest.raises(ValueError, match="one of sum, advantage_sum, gdpo, geometric, got 'mean'"):
        mix({"a": 1.0}, "mean")


def test_pointwise_transforms_change_each_value_by_itself() -> None:
    mixture = Mixture((part("a", {"name": "affine", "scale": 0.25, "shift": -0.25}, {"name": "clip", "high": 0.5}),))
    assert combined(mixture, a=[1.0, 3.0, 5.0, NAN])[:3] == [0.0, 0.5, 0.5]


def test_ranks_are_taken_inside_the_group_with_ties_shared_and_failures_left_out() -> None:
    groups = ["p", "q", "p", "q", "p", "q", "p", "r"]
    values = [5.0, 1.0, 7.0, 1.0, NAN, 9.0, 6.0, 3.0]
    ranks = combined(Mixture((part("a", "rank"),)), groups, a=values)
    assert ranks[0] == 0.0 and ranks[6] == 0.5 and ranks[2] == 1.0  # 5 < 6 < 7
    assert [ranks[k] for k in (1, 3, 5)] == [0.25, 0.25, 1.0]  # two lowest share (0 + 1) / 2 of 2
    assert math.isnan(ranks[4]) and ranks[7] == 0.5
    grown = combined(Mixture((part("a", "rank"),)), groups, a=[math.exp(v) for v in values])
    torch.testing.assert_close(torch.tensor(grown), torch.tensor(ranks), equal_nan=True)


def test_log_tame_damps_the_reward_that_varies_most_for_its_size() -> None:
    wild, calm = [0.0, 8.0], [4.0, 6.0]  # h = 1 and 0.2, mean 0.6
    mixture = Mixture((part("wild", "log_tame"), part("calm", "log_tame")))
    found = mixture.combine({"wild": wild, "calm": calm}, ["g", "g"])
    assert (
        found.columns["wild"].tolist() == pytest.approx([0.0, math.log(9)]) and found.columns["calm"].tolist() == calm
    )
    fixed = Mixture((part("wild", {"name": "log_tame", "threshold": 1.5}), part("calm")))
    assert combined(fixed, wild=wild, calm=calm) == [4.0, 14.0]


def test_log_tame_with_an_infinite_threshold_is_the_plain_sum() -> None:
    columns = {"a": [0.3, 9.0, 2.0], "b": [1.0, 4.0, 0.5]}
    tamed = Mixture(tuple(part(name, {"name": "log_tame", "threshold": math.inf}) for name in columns))
    assert combined(tamed, **columns) == combined(Mixture((part("a"), part("b"))), **columns)


@pytest.mark.parametrize("values", [[-2.0, 9.0], [-0.5, 0.2]])
def test_log_tame_refuses_values_that_have_no_size(values: list[float]) -> None:
    with pytest.raises(InvalidScoreError, match=r"log_tame does not apply to reward 'a'.*shift it by 'affine' first"):
        combined(Mixture((part("a", "log_tame"),)), a=values)


def test_log_tame_does_not_look_at_rewards_without_weight() -> None:
    mixture = Mixture((part("a", "log_tame"), part("logged", weight=0.0)))
    assert combined(mixture, a=[1.0, 2.0], logged=[-5.0, -7.0]) == [1.0, 2.0]  # one reward is its own mean


def test_transforms_of_the_rollout_come_last() -> None:
    with pytest.raises(ValueError, match="come before rank, log_tame"):
        part("a", "rank", "clip")
    with pytest.raises(ValueError, match=r"transforms\.0: no transform is called 'ranks'; did you mean 'rank'"):
        part("a", "ranks")
    with pytest.raises(ValueError, match="low < high"):
        part("a", {"name": "clip", "low": 1, "high": 0})


def test_held_out_values_keep_pointwise_transforms_alone() -> None:
    shift = {"name": "affine", "shift": 10.0}
    mixture = Mixture((Part(constant("a", 1.0, 2.0), 1.0, part("a", shift, "rank").transforms),))
    assert ask(mixture.held_out()).values.tolist() == [11.0, 12.0]
    assert combined(mixture, a=[1.0, 2.0]) == [0.0, 1.0]


class Compared:
    """A groupwise reward."""

    name, needs, scope = "compared", frozenset[str](), "group"

    def validate(self, prompts: Any, metadata: Any) -> None: ...

    def __call__(self, batch: RewardBatch) -> RewardOutput:
        raise AssertionError("held-out pictures have no group")


def test_evaluations_leave_out_what_compares_a_group() -> None:
    both = Mixture((Part(Scorer(Compared())), Part(constant("a", 1.0, 2.0), 0.5)))
    assert both.held_out().labels == ("a",) and ask(both.held_out()).values.tolist() == [0.5, 1.0]
    logged = Mixture((Part(Scorer(Compared())), Part(constant("a", 1.0, 2.0), 0.0)))
    assert ask(logged.held_out()).values.tolist() == [1.0, 2.0]
    with pytest.raises(ValueError, match="the rewards compared compare pictures of a group"):
        Mixture((Part(Scorer(Compared())),)).held_out()


def test_a_failure_stops_training_as_told_and_no_evaluation() -> None:
    reward = FunctionReward(lambda images, prompts, metadata: [None, 1.0], "flaky")
    strict = Mixture((Part(Scorer(reward)),))
    with pytest.raises(InvalidScoreError, match="'flaky' could not score 1 of 2"):
        ask(strict)
    assert ask(strict.held_out()).valid.tolist() == [False, True]


def test_rewards_of_unlike_scales_have_equal_say_after_ranking() -> None:
    large, small = [100.0, 0.0, 50.0], [0.0, 1.0, 0.5]
    raw = combined(Mixture((part("large"), part("small"))), large=large, small=small)
    assert raw.index(max(raw)) == 0  # the large scale decides alone
    ranked = Mixture((part("large", "rank"), part("small", "rank")))
    assert combined(ranked, large=large, small=small) == [1.0, 1.0, 1.0]
