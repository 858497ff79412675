"""The scoring wrapper: matched pairs, ids, validity, and the post-conditions of a reward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from flowrl_img.rewards.mixture import Mixture
from flowrl_img.rewards.protocol import Reward, RewardBatch, RewardOutput
from flowrl_img.rewards.registry import FunctionReward
from flowrl_img.rewards.score import InvalidScoreError, score


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
WRAPPERS = {"function": PAIRS, "mixture": Mixture({"pairs": 1.0}, {"pairs": PAIRS})}


def pictures(*levels: int) -> torch.Tensor:
    return torch.tensor(levels).float().div(255)[:, None, None, None].expand(-1, 3, 2, 2).clone()


def ask(reward: Reward, levels: Sequence[int], prompts: Sequence[int], **options: Any) -> RewardOutput:
    texts, ids = [str(p) for p in prompts], [f"s{k}" for k in range(len(levels))]
    return score(reward, pictures(*levels), texts, [{} for _ in texts], ids, **options)


@pytest.mark.parametrize("reward", WRAPPERS.values(), ids=WRAPPERS)
def test_pairs_score_as_pairs_whatever_the_batch(reward: Reward) -> None:
    levels, prompts = [3, 0, 7, 5], [1, 2, 0, 9]
    expected = [31.0, 2.0, 70.0, 59.0]
    assert ask(reward, levels, prompts).values.tolist() == expected
    assert [ask(reward, [i], [p]).values.item() for i, p in zip(levels, prompts, strict=True)] == expected
    for size in (1, 2, 3, 4, 9):
        assert ask(reward, levels, prompts, batch_size=size).values.tolist() == expected


@pytest.mark.parametrize("reward", WRAPPERS.values(), ids=WRAPPERS)
def test_scores_follow_a_permutation_of_the_pairs(reward: Reward) -> None:
    levels, prompts, order = [3, 0, 7], [1, 2, 0], [2, 0, 1]
    straight = ask(reward, levels, prompts).values
    assert torch.equal(ask(reward, [levels[k] for k in order], [prompts[k] for k in order]).values, straight[order])


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
