import pytest
import torch

from flowrl_img.advantages import group_advantages


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
    with pytest.raises(ValueError, match="group, global or none"):
        group_advantages(torch.zeros(2), torch.ones(2, dtype=torch.bool), ["a", "a"], scale="std")
