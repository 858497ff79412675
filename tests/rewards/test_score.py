"""The scoring wrapper: matched pairs, ids, validity, and the post-conditions of a reward."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from flowrl_img.rewards.failures import FailureBudget
from flowrl_img.rewards.mixture import Mixture, Part
from flowrl_img.rewards.protocol import RewardBatch, RewardOutput
from flowrl_img.rewards.registry import FunctionReward
from flowrl_img.rewards.score import InvalidScoreError, Scorer, score


def pair_score(images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Any]) -> list[float]:
    """s(i, p) = 10 i + p, where picture i has the level i and prompt p is its number."""
    return [10.0 * int(image[0, 0, 0]) + int(prompt) for image, prompt in zip(images, prompts, strict=True)]


def table_score(images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Any]) -> torch.Tensor:
    """The defect of some scorers: every picture against every prompt."""
    return torch.tensor([[10.0 * int(i[0, 0, 0]) + int(p) for p in prompts] for i in images])


@dataclass(frozen=True)
class Scripted:
    """Answers with what it was given."""

    answer: Callable[[RewardBatch], RewardOutput]
    name: str = "scripted"
    needs: frozenset[str] = frozenset()

    def validate(self, prompts: Sequence[str], metadata: Sequence[Any]) -> None:
        pass

    def __call__(self, batch: RewardBatch) -> RewardOutput:
        return self.answer(batch)


PAIRS = FunctionReward(pair_score, "pairs")
WRAPPERS = {
    "function": lambda size: Scorer(PAIRS, batch_size=size),
    "cached": lambda size: Scorer(PAIRS, batch_size=size, cache=3),
    "mixture": lambda size: Mixture((Part(Scorer(PAIRS, batch_size=size)),)),
}
every_wrapper = pytest.mark.parametrize("wrapped", WRAPPERS.values(), ids=WRAPPERS)


def pictures(*levels: int) -> torch.Tensor:
    return torch.tensor(levels).float().div(255)[:, None, None, None].expand(-1, 3, 2, 2).clone()


def ask(reward: Any, levels: Sequence[int], prompts: Sequence[int], **options: Any) -> RewardOutput:
    texts, ids = [str(p) for p in prompts], [f"s{k}" for k in range(len(levels))]
    return score(reward, pictures(*levels), texts, [{} for _ in texts], ids, **options)


@every_wrapper
def test_pairs_score_as_pairs_whatever_the_batch(wrapped: Any) -> None:
    levels, prompts = [3, 0, 7, 5], [1, 2, 0, 9]
    expected = [31.0, 2.0, 70.0, 59.0]
    for size in (None, 1, 2, 3, 4, 9):
        assert ask(wrapped(size), levels, prompts).values.tolist() == expected
    scorer = wrapped(None)
    assert [ask(scorer, [i], [p]).values.item() for i, p in zip(levels, prompts, strict=True)] == expected


@every_wrapper
def test_scores_follow_a_permutation_of_the_pairs(wrapped: Any) -> None:
    levels, prompts, order = [3, 0, 7], [1, 2, 0], [2, 0, 1]
    scorer = wrapped(2)
    straight = ask(scorer, levels, prompts).values
    assert torch.equal(ask(scorer, [levels[k] for k in order], [prompts[k] for k in order]).values, straight[order])


def test_another_number_of_prompts_than_pictures_is_an_error() -> None:
    with pytest.raises(ValueError, match="every row needs one picture, prompt, metadata and id"):
        ask(PAIRS, [1, 2, 3], [1, 2])


def test_a_table_of_all_pictures_and_prompts_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"one number per pair: \[3\], got \[3, 3\]"):
        ask(FunctionReward(table_score, "table"), [1, 2, 3], [1, 2, 3])


def test_repeated_ids_are_an_error() -> None:
    with pytest.raises(ValueError, match="ids must be unique"):
        score(PAIRS, pictures(1, 2), ["1", "2"], [{}, {}], ["a", "a"])


def test_rows_are_joined_by_id_where_the_scorer_reorders_them() -> None:
    def reversed_answer(batch: RewardBatch) -> RewardOutput:
        out = PAIRS(batch)
        return RewardOutput(out.values.flip(0), out.valid.flip(0), {"p": batch.prompts[::-1]}, batch.ids[::-1])

    out = ask(Scripted(reversed_answer), [3, 0, 7], [1, 2, 0])
    assert out.values.tolist() == [31.0, 2.0, 70.0]
    assert out.details["p"] == ["1", "2", "0"]


def test_answers_for_other_ids_are_an_error() -> None:
    foreign = Scripted(lambda b: RewardOutput(torch.zeros(2), torch.ones(2, dtype=torch.bool), {}, ["s0", "x"]))
    with pytest.raises(ValueError, match="other ids than asked"):
        ask(foreign, [1, 2], [1, 2])


def test_a_broken_picture_is_invalid_and_never_reaches_the_scorer() -> None:
    seen: list[int] = []
    reward = FunctionReward(lambda i, p, m: [seen.append(len(i)) or 1.0] * len(i), "ones")
    images = pictures(1, 2, 3)
    images[1, 0, 0, 0] = torch.nan
    out = score(reward, images, ["a", "b", "c"], [{}] * 3, ["x", "y", "z"], policy="mask")
    assert seen == [2]
    assert out.valid.tolist() == [True, False, True]
    assert out.values[1].isnan()
    assert "NaN" in out.details["error"][1]
    with pytest.raises(InvalidScoreError, match="'y': 'the picture holds NaN or infinity'"):
        score(reward, images, ["a", "b", "c"], [{}] * 3, ["x", "y", "z"])


@pytest.mark.parametrize("failed", [None, float("nan"), float("inf")])
def test_a_failed_score_is_invalid_and_never_zero(failed: float | None) -> None:
    reward = FunctionReward(lambda i, p, m: [1.0, failed], "flaky")
    out = ask(reward, [1, 2], [1, 2], policy="mask")
    assert out.valid.tolist() == [True, False]
    assert out.values[0] == 1.0 and out.values[1].isnan()
    with pytest.raises(InvalidScoreError, match="could not score 1 of 2"):
        ask(reward, [1, 2], [1, 2])


def test_a_batch_of_broken_pictures_is_all_invalid() -> None:
    out = score(PAIRS, torch.full((2, 3, 2, 2), torch.nan), ["1", "2"], [{}, {}], ["a", "b"], policy="mask")
    assert not out.valid.any() and out.values.isnan().all()


YES = torch.ones(2, dtype=torch.bool)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (RewardOutput(torch.zeros(3), torch.ones(3, dtype=torch.bool)), "one value per pair"),
        (RewardOutput(torch.zeros(2, dtype=torch.float64), YES), "float32"),
        (RewardOutput(torch.zeros(2), torch.ones(2)), "bool"),
        (RewardOutput(torch.tensor([1.0, torch.nan]), YES), "non-finite value marked valid"),
        (RewardOutput(torch.zeros(2), YES, {"short": [1]}), "details"),
    ],
    ids=["length", "values dtype", "valid dtype", "finite", "details"],
)
def test_an_answer_that_breaks_the_protocol_is_an_error(output: RewardOutput, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ask(Scripted(lambda batch: output), [1, 2], [1, 2])


def test_an_exception_in_a_scorer_is_not_swallowed() -> None:
    def broken(batch: RewardBatch) -> RewardOutput:
        raise KeyError("bug")

    with pytest.raises(KeyError):
        ask(Scripted(broken), [1], [1], policy="mask")


def test_missing_metadata_is_an_error_that_names_the_line_and_key() -> None:
    reward = Scripted(PAIRS, needs=frozenset({"style"}))
    with pytest.raises(ValueError, match=r"line 2: .*\['style'\]"):
        score(reward, pictures(1, 2), ["1", "2"], [{"style": "x"}, {}], ["a", "b"])


def test_unknown_policies_and_batch_sizes_are_errors() -> None:
    with pytest.raises(ValueError, match=r"\['mask', 'raise'\]"):
        ask(PAIRS, [1], [1], policy="zero")
    with pytest.raises(ValueError, match="batch_size"):
        ask(PAIRS, [1], [1], batch_size=0)


def test_scores_carry_no_graph_and_may_enter_one() -> None:
    values = ask(PAIRS, [1], [1]).values
    weight = torch.ones(1, requires_grad=True)
    (weight * values).sum().backward()
    assert weight.grad is not None and weight.grad.item() == 11.0


def test_failures_within_the_budget_are_left_out_and_more_stop_the_run() -> None:
    reward = FunctionReward(lambda i, p, m: [None if int(q) < 0 else 1.0 for q in p], "flaky")
    scorer = Scorer(reward, failures=FailureBudget("mask", share=0.01))  # 5 in 500
    for _ in range(5):
        assert ask(scorer, [1, 2], [-1, 1]).valid.tolist() == [False, True]
    with pytest.raises(InvalidScoreError, match=r"could not score 6 of the last 12 samples, more than its budget of 5"):
        ask(scorer, [1, 2], [-1, 1])


def test_old_failures_leave_the_budget_again() -> None:
    budget = FailureBudget("mask", share=0.01)
    failed, fine = (RewardOutput.of([value] * 5) for value in (None, 1.0))
    for _ in range(3):
        budget.count("r", failed)
        for _ in range(99):
            budget.count("r", fine)
    assert (budget.asked, budget.failed) == (1500, 15)


def test_a_share_of_one_bears_everything() -> None:
    budget = FailureBudget("mask", share=1.0)
    for _ in range(5):
        budget.count("r", RewardOutput.of([None] * 200))


@pytest.mark.parametrize("budget", [{"policy": "zero"}, {"policy": "mask", "share": -0.1}, {"share": 1.5}])
def test_a_budget_that_says_nothing_is_refused(budget: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"policy must be one of|must lie in"):
        FailureBudget(**budget)


def counted(calls: list[int], answer: Callable[[str], float | None]) -> FunctionReward:
    def reward(images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Any]) -> list[float | None]:
        calls.append(len(prompts))
        return [answer(prompt) for prompt in prompts]

    return FunctionReward(reward, "counted")


def test_equal_content_is_asked_once_whatever_its_id() -> None:
    calls: list[int] = []
    scorer = Scorer(counted(calls, float), cache=10)
    first = ask(scorer, [1, 2, 3], [4, 5, 6])
    again = score(scorer, pictures(2, 9, 1), ["5", "7", "4"], [{}] * 3, ["x", "y", "z"])
    assert first.values.tolist() == [4.0, 5.0, 6.0] and again.values.tolist() == [5.0, 7.0, 4.0]
    assert calls == [3, 1] and scorer.memory is not None and scorer.memory.hits == 2


@pytest.mark.parametrize("change", ["picture", "prompt", "metadata", "shape"])
def test_any_other_content_is_asked_again(change: str) -> None:
    calls: list[int] = []
    scorer = Scorer(counted(calls, float), cache=10)
    base = {"picture": pictures(1), "prompt": "4", "metadata": {"tag": "a"}}
    other = {"picture": pictures(2), "prompt": "5", "metadata": {"tag": "b"}, "shape": pictures(1).view(1, 3, 1, 4)}
    for row in (base, base | ({"picture": other["shape"]} if change == "shape" else {change: other[change]})):
        score(scorer, row["picture"], [row["prompt"]], [row["metadata"]], ["s"])
    assert calls == [1, 1]


def test_failures_are_not_remembered() -> None:
    calls: list[int] = []
    answers = iter([None, 2.0])
    scorer = Scorer(counted(calls, lambda prompt: next(answers)), failures=FailureBudget("mask"), cache=10)
    assert not ask(scorer, [1], [1]).valid.any()
    assert ask(scorer, [1], [1]).values.tolist() == [2.0] and calls == [1, 1]


def test_the_rows_used_longest_ago_are_forgotten_first() -> None:
    calls: list[int] = []
    scorer = Scorer(counted(calls, float), cache=2)
    for level in (1, 2, 1, 3, 1, 2):  # 2 was dropped for 3
        ask(scorer, [level], [level])
    assert calls == [1, 1, 1, 1]


def test_details_come_back_from_the_cache() -> None:
    scorer = Scorer(Scripted(lambda b: RewardOutput.of(map(float, b.prompts), {"seen": list(b.prompts)})), cache=10)
    ask(scorer, [1], [1])
    assert ask(scorer, [2, 1], [2, 1]).details["seen"] == ["2", "1"]


@dataclass(frozen=True)
class Contest:
    """For each row the number of darker pictures in its group; the group's size as a detail."""

    scope: str = "group"
    name: str = "contest"
    needs: frozenset[str] = frozenset()

    def validate(self, prompts: Sequence[str], metadata: Sequence[Any]) -> None: ...

    def __call__(self, batch: RewardBatch) -> RewardOutput:
        levels, groups = batch.images[:, 0, 0, 0].int(), batch.group_ids
        assert groups is not None
        mates = [[levels[k] for k in range(len(batch)) if groups[k] == groups[row]] for row in range(len(batch))]
        darker = [float(sum(level < levels[row] for level in own)) for row, own in enumerate(mates)]
        return RewardOutput.of(darker, {"mates": [len(own) for own in mates], "calls": [len(batch)] * len(batch)})


@pytest.mark.parametrize(("size", "calls"), [(None, 5), (4, 3), (2, 3)])
def test_a_groupwise_reward_is_given_whole_groups(size: int | None, calls: int) -> None:
    groups = ["p", "q", "p", "q", "p"]
    out = score(
        Scorer(Contest(), batch_size=size), pictures(1, 9, 3, 4, 2), [""] * 5, [{}] * 5, list("abcde"), group_ids=groups
    )
    assert out.values.tolist() == [0.0, 1.0, 2.0, 0.0, 1.0] and out.details["mates"] == [3, 2, 3, 2, 3]
    assert max(out.details["calls"]) == calls


def test_a_broken_picture_is_no_mate() -> None:
    images = pictures(1, 2, 3)
    images[0] = torch.nan
    scorer = Scorer(Contest(), failures=FailureBudget("mask"))
    out = score(scorer, images, [""] * 3, [{}] * 3, list("abc"), group_ids=["g"] * 3)
    assert out.valid.tolist() == [False, True, True] and out.values[1:].tolist() == [0.0, 1.0]


def test_a_groupwise_reward_needs_groups_and_has_no_cache() -> None:
    with pytest.raises(ValueError, match="give group_ids"):
        ask(Contest(), [1], [1])
    with pytest.raises(ValueError, match="depends on the whole group"):
        Scorer(Contest(), cache=5)
    with pytest.raises(ValueError, match="scope must be point, group or set, got 'pair'"):
        Scorer(Contest("pair"))


def test_a_setwise_reward_gives_one_value_to_a_group() -> None:
    class Spread(Contest):
        def __call__(self, batch: RewardBatch) -> RewardOutput:
            groups = batch.group_ids or []
            sizes = [float(groups.count(group)) for group in groups]
            return RewardOutput.of(sizes)

    asked = (pictures(1, 2, 3), [""] * 3, [{}] * 3, list("abc"))
    assert score(Spread("set"), *asked, group_ids=["p", "q", "p"]).values.tolist() == [2.0, 1.0, 2.0]
    with pytest.raises(ValueError, match=r"judges a group as a whole, but gave group 'p' \[0\.0, 1\.0\]"):
        score(Contest("set"), *asked, group_ids=["p", "q", "p"])


def test_the_time_spent_in_a_reward_is_counted() -> None:
    scorer = Scorer(FunctionReward(lambda i, p, m: time.sleep(0.02) or [1.0] * len(i), "slow"), batch_size=1)
    ask(scorer, [1, 2, 3], [1, 2, 3])
    assert 0.06 <= scorer.seconds < 0.5
