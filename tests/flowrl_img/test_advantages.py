import pytest
import torch

from flowrl_img.advantages import History, combined_advantages, group_advantages


def everything_valid(rewards: torch.Tensor) -> torch.Tensor:
    return torch.ones(len(rewards), dtype=torch.bool)


@pytest.mark.parametrize("layout", ["", "_interleaved"])
@pytest.mark.parametrize(("scale", "flag"), [("group", "False"), ("global", "True")])
def test_published_trackers_numbers_are_met(golden, layout, scale, flag):
    case = golden("advantages", f"adv_fg{layout}_globalstd{flag}")
    groups = [str(g) for g in case["group_id"].tolist()]
    got = group_advantages(case["rewards"], everything_valid(case["rewards"]), groups, scale=scale, eps=1e-4)
    case.check("advantages", got)


def test_constant_groups_are_exactly_zero():
    rewards = torch.full((24,), 0.97772)
    got = group_advantages(rewards, everything_valid(rewards), ["a"] * 23 + ["b"], scale="group", eps=0.0)
    assert got.abs().max() == 0


def test_one_outlier_among_equals_stays_bounded():
    rewards = torch.tensor([0.35] * 7 + [1.0])
    got = group_advantages(rewards, everything_valid(rewards), ["a"] * 8)
    assert got.isfinite().all()
    assert got.abs().max() < 8**0.5  # the bound of a standardised sample of 8


def test_invalid_rewards_change_nothing_and_get_zero():
    rewards = torch.tensor([0.1, 0.5, float("nan"), 0.9])
    valid = torch.tensor([True, True, False, True])
    got = group_advantages(rewards, valid, ["a"] * 4)
    alone = group_advantages(rewards[valid], torch.ones(3, dtype=torch.bool), ["a"] * 3)
    torch.testing.assert_close(got[valid], alone, rtol=0, atol=0)
    assert got[2] == 0


def test_groups_with_fewer_than_two_valid_rewards_are_skipped():
    got = group_advantages(torch.tensor([0.1, 0.9, 0.3]), torch.tensor([True, False, True]), ["a", "a", "b"])
    assert got.tolist() == [0, 0, 0]


def test_permuting_samples_permutes_advantages():
    rewards = torch.rand(12, generator=torch.Generator().manual_seed(0))
    groups = [str(k % 3) for k in range(12)]
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1)).tolist()
    whole = group_advantages(rewards, everything_valid(rewards), groups)
    shuffled = group_advantages(rewards[order], everything_valid(rewards), [groups[k] for k in order])
    torch.testing.assert_close(shuffled, whole[order], rtol=1e-12, atol=1e-12)


def test_groups_with_other_means_are_centred_each():
    rewards = torch.tensor([0.0, 1.0, 10.0, 11.0])
    groups = ["a", "a", "b", "b"]
    got = group_advantages(rewards, everything_valid(rewards), groups, scale="none")
    assert got.tolist() == [-0.5, 0.5, -0.5, 0.5]


def test_unknown_scale_is_refused():
    with pytest.raises(ValueError, match="one of group, global, none, sign"):
        group_advantages(torch.zeros(2), torch.ones(2, dtype=torch.bool), ["a", "a"], scale="std")


def test_published_binary_advantages_are_met(golden):
    case = golden("advantages", "adv_dgpo_binarised")
    groups = [str(g) for g in case["group_id"].tolist()]
    case.check("advantages", group_advantages(case["rewards"], everything_valid(case["rewards"]), groups, scale="sign"))


COMBINED = [
    ("adv_ff_gdpo_distributed_k_repeat", "gdpo", "group"),
    ("adv_ff_gdpo_group_contiguous", "gdpo", "group"),
    ("adv_ff_sum_global", "sum", "global"),
    ("adv_ff_sum_group", "sum", "group"),
]


@pytest.mark.parametrize(("name", "aggregate", "scale"), COMBINED)
def test_published_advantages_of_two_rewards_are_met(golden, name, aggregate, scale):
    """The reference floors the spread at 1e-6 where ours adds eps: without eps both are the same number."""
    case = golden("advantages", name)
    columns = {"a": case["reward_a"], "b": case["reward_b"]}
    groups = [str(g) for g in case["group_id"].tolist()]
    got = combined_advantages(
        columns, case.scalars["weights"], everything_valid(columns["a"]), groups,
        aggregate=aggregate, scale=scale, eps=0.0,
    )  # fmt: skip
    case.check("advantages", got)


def test_published_advantages_per_step_are_met_by_one_group_per_step(golden):
    """A forked rollout has one group for every trunk and step: the columns of the published table."""
    case = golden("advantages", "adv_fg_perstep_columns")
    rewards, (rows, steps) = case["rewards"], case["rewards"].shape
    groups = [f"{g}@{step}" for g in case["group_id"].tolist() for step in range(steps)]
    got = group_advantages(rewards.flatten(), everything_valid(rewards.flatten()), groups)
    case.check("advantages", got.view(rows, steps))


def test_all_constant_rewards_are_exactly_zero_as_published(golden):
    case = golden("advantages", "adv_fg_allconstant")
    groups = [str(g) for g in case["group_id"].tolist()]
    got = group_advantages(case["rewards"].flatten(), everything_valid(case["rewards"].flatten()), groups)
    case.check("advantages", got.view_as(case["advantages"]))
    assert got.abs().max() == 0


def test_leave_one_out_compares_with_the_mean_of_the_others():
    rewards = torch.tensor([1.0, 2.0, 6.0])
    got = group_advantages(rewards, everything_valid(rewards), ["a"] * 3, baseline="leave_one_out", scale="none")
    assert got.tolist() == [1 - 4, 2 - 3.5, 6 - 1.5]


def test_without_baseline_and_scale_the_reward_is_the_advantage():
    rewards = torch.tensor([0.5, 0.5, 2.0, 3.0])
    got = group_advantages(rewards, everything_valid(rewards), ["a", "a", "b", "b"], baseline="none", scale="none")
    assert got.tolist() == rewards.tolist()


@pytest.mark.parametrize("scale", ["group", "global", "none", "sign"])
@pytest.mark.parametrize("baseline", ["group", "leave_one_out", "history"])
def test_no_spread_is_exactly_zero_under_every_rule(baseline, scale):
    rewards = torch.tensor([0.97772] * 23 + [0.1, 0.3])
    groups, prompts = ["a"] * 23 + ["b"] * 2, ["p"] * 23 + ["q"] * 2
    history = History(32, 2) if baseline == "history" else None
    got = group_advantages(
        rewards, everything_valid(rewards), groups, baseline=baseline, scale=scale, eps=0.0, history=history,
        prompts=prompts,
    )  # fmt: skip
    assert got[:23].abs().max() == 0
    assert got[23:].abs().min() > 0


def test_the_history_of_a_prompt_is_its_baseline_once_it_is_long_enough():
    history = History(size=4, min_count=4)
    rule = {"baseline": "history", "scale": "none", "history": history}

    def advantages(a, b):
        rewards = torch.tensor([*a, *b])
        return group_advantages(
            rewards, everything_valid(rewards), ["a", "a", "b", "b"], prompts=["p", "p", "q", "q"], **rule
        ).tolist()

    assert advantages([0.0, 1.0], [4.0, 7.0]) == [-3, -2, 1, 4]  # the rollout's own mean is 3
    assert advantages([2.0, 5.0], [4.0, 5.0]) == [0, 3, -1, 0]  # means of (0, 1, 2, 5) and (4, 7, 4, 5)
    assert history.rewards == {"p": [0, 1, 2, 5], "q": [4, 7, 4, 5]}
    assert advantages([8.0, 9.0], [5.0, 6.0]) == [2, 3, 0, 1]  # the oldest two are forgotten


def test_a_history_divides_by_its_own_spread_as_ddpo_does():
    history = History(8, 2)
    history.observe(["p"] * 4, torch.tensor([1.0, 3.0, 1.0, 3.0]), torch.ones(4, dtype=torch.bool))
    rewards = torch.tensor([2.0, 2.0])
    got = group_advantages(
        rewards, everything_valid(rewards), ["a", "a"], baseline="history", eps=0.0, history=history, prompts=["p", "p"]
    )
    assert got.tolist() == [0, 0]
    rewards = torch.tensor([4.0, 0.0])
    got = group_advantages(
        rewards, everything_valid(rewards), ["a", "a"], baseline="history", eps=0.0, history=history, prompts=["p", "p"]
    )
    seen = torch.tensor([1.0, 3.0, 1.0, 3.0, 2.0, 2.0, 4.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(got, (rewards.double() - 2) / seen.std(correction=0))


def test_invalid_rewards_never_enter_a_history():
    history = History(8, 2)
    history.observe(["p", "p"], torch.tensor([float("nan"), 1.0]), torch.tensor([False, True]))
    assert history.rewards == {"p": [1.0]}


def test_one_reward_gives_the_group_advantage_and_gdpo_then_standardises_it():
    generator = torch.Generator().manual_seed(0)
    rewards, groups = torch.rand(12, generator=generator), [str(k // 4) for k in range(12)]
    valid = everything_valid(rewards)
    alone = group_advantages(rewards, valid, groups)
    for how in ("sum", "advantage_sum"):
        torch.testing.assert_close(combined_advantages({"a": rewards}, {"a": 1.0}, valid, groups, aggregate=how), alone)
    got = combined_advantages({"a": rewards}, {"a": 1.0}, valid, groups, aggregate="gdpo", eps=0.0)
    plain = group_advantages(rewards, valid, groups, eps=0.0)
    torch.testing.assert_close(got, (plain - plain.mean()) / plain.std(correction=0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("how", ["advantage_sum", "gdpo"])
def test_the_scale_of_a_reward_does_not_matter_when_advantages_are_summed(how):
    generator = torch.Generator().manual_seed(0)
    a, b = torch.rand(2, 8, generator=generator).double()
    groups, valid = ["x"] * 4 + ["y"] * 4, torch.ones(8, dtype=torch.bool)
    rule = {"aggregate": how, "eps": 0.0}
    small = combined_advantages({"a": a, "b": b}, {"a": 1.0, "b": 1.0}, valid, groups, **rule)
    large = combined_advantages({"a": a, "b": 1000 * b}, {"a": 1.0, "b": 1.0}, valid, groups, **rule)
    torch.testing.assert_close(small, large, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("how", ["sum", "advantage_sum", "gdpo"])
def test_groups_that_no_reward_tells_apart_are_exactly_zero_and_invalid_rows_too(how):
    a = torch.tensor([0.3, 0.3, 0.1, 0.9, 0.5])
    b = torch.tensor([0.7, 0.7, 0.2, 0.4, float("nan")])
    valid = torch.tensor([True, True, True, True, False])
    got = combined_advantages({"a": a, "b": b}, {"a": 1.0, "b": 2.0}, valid, ["x", "x", "y", "y", "y"], aggregate=how)
    assert got[[0, 1, 4]].tolist() == [0, 0, 0]
    assert got[3] > 0 > got[2]


def test_a_reward_of_weight_zero_does_not_count_even_where_it_failed():
    a, b = torch.tensor([0.0, 1.0]), torch.tensor([float("nan"), 5.0])
    valid = everything_valid(a)
    got = combined_advantages({"a": a, "b": b}, {"a": 1.0, "b": 0.0}, valid, ["x", "x"], eps=0.0)
    assert got.tolist() == [-1, 1]


def test_unknown_names_and_a_missing_history_are_refused():
    two, valid = torch.zeros(2), torch.ones(2, dtype=torch.bool)
    with pytest.raises(ValueError, match="baseline must be one of"):
        group_advantages(two, valid, ["a", "a"], baseline="critic")
    with pytest.raises(ValueError, match="aggregate must be one of"):
        combined_advantages({"a": two}, {"a": 1.0}, valid, ["a", "a"], aggregate="mean")
    with pytest.raises(ValueError, match="needs a History"):
        group_advantages(two, valid, ["a", "a"], baseline="history")
