"""Rewards that ask a vision-language model: what is sent, what is read, what a bad reply does."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from judges import MODEL, Seen, completion, judging, sensible, taste
from PIL import Image

from flowrl_img.rewards import known_answers
from flowrl_img.rewards.editscore import EditScore, marks_of
from flowrl_img.rewards.failures import FailureBudget
from flowrl_img.rewards.judge import Judge, Reply
from flowrl_img.rewards.known_answers import KnownAnswerError
from flowrl_img.rewards.preference import Preference, verdict
from flowrl_img.rewards.protocol import Reward, RewardBatch, RewardOutput
from flowrl_img.rewards.remote import RemoteError
from flowrl_img.rewards.score import InvalidScoreError, Scorer
from flowrl_img.rewards.unifiedreward import UnifiedReward, final_score
from flowrl_img.rewards.yesno import YesNo, certainty

RED, BLUE, DARK = (np.full((32, 32, 3), color, np.uint8) for color in ((250, 20, 20), (20, 20, 250), (40, 40, 45)))
Answer = Callable[[dict[str, Any]], Any]


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    from flowrl_img.rewards.transport import Retry

    own = Retry.pause
    monkeypatch.setattr(Retry, "pause", lambda self, number, rng: own(self, number, rng) / 100)


def judge(url: str, **options: Any) -> Judge:
    return Judge(url, MODEL, **{"deadline": 5.0, "tries": 3, **options})


def batch(
    *pictures: np.ndarray, prompts: list[str] | None = None, metadata: Any = None, groups: Any = None
) -> RewardBatch:
    count = len(pictures)
    images = torch.from_numpy(np.stack(pictures))
    return RewardBatch(
        images, prompts or ["a red thing"] * count, metadata or [{}] * count, [f"s{k}" for k in range(count)], groups
    )


def masked(reward: Reward, asked: RewardBatch) -> RewardOutput:
    return Scorer(reward, failures=FailureBudget("mask", share=1.0))(asked)


# -- UnifiedReward


@pytest.mark.parametrize(
    ("text", "mark"),
    [
        ("Final Score: 4", 4.0),
        ("**Final Score:** 4", 4.0),
        ("Final score: 3.5.", 3.5),
        ("final score\n[4]", 4.0),
        ("Final Score: *2*", 2.0),
        ("Final Score: 4/5", 4.0),
        ("Final Score: 3, then again Final Score: 4-5", None),
        ("Final Score: 4,5", None),
        ("Final Score: 4.5.", 4.5),
        ("Final Score: 2. On reflection, Final Score: 3", 3.0),
        ("Final Score: 10", None),
        ("Final Score: 5.9", None),
        ("Final Score: 0", None),
        ("Final Score: -3", None),
        ("Final Score: 8/10", None),
        ("Final", None),
        ("Final Score: four", None),
        ("The score is 4", None),
        ("", None),
    ],
)
def test_a_mark_is_the_last_whole_number_from_1_to_5(text: str, mark: float | None) -> None:
    assert final_score(text) == mark


def test_unifiedreward_sends_one_png_and_the_task_and_divides_by_five() -> None:
    with judging(lambda body: completion("Final Score: 4")) as service:
        reward = UnifiedReward(judge(service.url), size=48)
        assert masked(reward, batch(RED, prompts=["a {red} [thing]"])).values.tolist() == [pytest.approx(0.8)]
    [seen] = service.asked
    assert [picture.shape for picture in seen.pictures] == [(48, 48, 3)]
    assert (
        seen.text.startswith("<image>\nYou are given a text caption") and "Text Caption: [a {red} [thing]]" in seen.text
    )
    assert seen.body["temperature"] == 0 and seen.body["model"] == MODEL
    assert [part["type"] for part in seen.body["messages"][0]["content"]] == ["image_url", "text"]


def test_every_picture_is_asked_with_its_own_prompt_and_answers_keep_their_place() -> None:
    def slow_for_red(body: dict[str, Any]) -> Any:
        time.sleep(0.2 if "red" in Seen.of(body).text.rpartition("[")[2] else 0)
        return sensible(body)

    with judging(slow_for_red) as service:
        reward = UnifiedReward(judge(service.url), size=0)
        prompts = ["a red thing", "a blue thing", "a red thing", "a blue thing"]
        values = masked(reward, batch(RED, RED, BLUE, BLUE, prompts=prompts)).values
    expected = [
        (1 + 4 * taste(p, t)) / 5 for p, t in zip([RED, RED, BLUE, BLUE], ["red", "blue", "red", "blue"], strict=True)
    ]
    assert values.tolist() == pytest.approx(expected, abs=1e-3)
    assert values[0] > values[1] and values[3] > values[2]


# -- yes or no


@pytest.mark.parametrize(
    ("first", "value"),
    [
        ({"Yes": 0.6, "No": 0.2}, 0.75),
        ({"Yes": 0.3, " yes": 0.2, "YES": 0.1, "No": 0.15, " no": 0.05}, 0.75),
        ({"▁Yes": 0.6, "Ġno": 0.2, "Yesterday": 0.1}, 0.75),
        ({"Yes": 0.9}, 1.0),
        ({"No": 0.9}, 0.0),
        ({"Maybe": 0.9, "The": 0.05}, None),
        ({}, None),
    ],
)
def test_certainty_is_yes_against_no_over_all_spellings(first: dict[str, float], value: float | None) -> None:
    found = certainty(Reply("", {token: math.log(p) for token, p in first.items()}))
    assert found == (None if value is None else pytest.approx(value))


def test_certainty_is_the_sigmoid_of_the_difference() -> None:
    found = certainty(Reply("", {"Yes": -0.7, "No": -1.9}))
    assert found == pytest.approx(1 / (1 + math.exp(-(-0.7 + 1.9))))


def test_yesno_asks_for_one_token_and_its_alternatives() -> None:
    with judging() as service:
        out = masked(YesNo(judge(service.url)), batch(RED, DARK))
    assert out.values[0] > out.values[1]
    body = service.asked[0].body
    assert (body["max_tokens"], body["logprobs"], body["top_logprobs"], body["temperature"]) == (1, True, 20, 0)
    assert service.asked[0].text == 'Does this figure show "a red thing"? Please answer yes or no.'


def test_a_reply_without_yes_or_no_is_invalid_with_what_was_said() -> None:
    with judging(lambda body: completion("Maybe", {"Maybe": 0.9})) as service:
        out = masked(YesNo(judge(service.url)), batch(RED))
    assert not out.valid.any() and "neither yes nor no among the 1 likeliest" in out.details["error"][0]
    assert "'Maybe'" in out.details["error"][0]


def test_a_server_without_log_probabilities_gives_no_score() -> None:
    with judging(lambda body: completion("Yes")) as service:
        assert not masked(YesNo(judge(service.url)), batch(RED)).valid.any()


def test_a_grid_is_judged_by_every_pair_of_its_cells() -> None:
    grid = np.block([[[RED], [BLUE]], [[DARK], [RED]]]).astype(np.uint8)
    with judging() as service:
        reward = YesNo(judge(service.url), questions=("Same style for {prompt}?",), show="grid")
        value = masked(reward, batch(grid)).values.item()
    cells = [RED, BLUE, DARK, RED]
    pairs = [(a, b) for k, a in enumerate(cells) for b in cells[k + 1 :]]
    expected = [math.sqrt(taste(a, "red") * taste(b, "red")) for a, b in pairs]
    assert value == pytest.approx(sum(expected) / 6) and len(service.asked) == 6
    assert all(picture.shape == (32, 32, 3) for seen in service.asked for picture in seen.pictures)


def test_an_edit_is_the_geometric_mean_of_two_questions_about_source_and_result(tmp_path: Path) -> None:
    Image.fromarray(BLUE).save(tmp_path / "before.png")

    def by_question(body: dict[str, Any]) -> Any:
        kept = "kept" in Seen.of(body).text
        return completion("Yes", {"Yes": 0.9, "No": 0.1} if kept else {"Yes": 0.4, "No": 0.6})

    with judging(by_question) as service:
        questions = ("Was the rest kept?", "Was it done: {prompt}?")
        reward = YesNo(judge(service.url), questions=questions, combine="geometric", show="edit")
        row = {"source": str(tmp_path / "before.png")}
        out = masked(reward, batch(RED, prompts=["make it red"], metadata=[row]))
    assert out.values.item() == pytest.approx(math.sqrt(0.9 * 0.4))
    assert json.loads(out.details["answers"][0]) == pytest.approx([0.9, 0.4])
    assert [np.array_equal(p, q) for p, q in zip(service.asked[0].pictures, (BLUE, RED), strict=True)] == [True, True]
    assert {seen.text for seen in service.asked} == {"Was the rest kept?", "Was it done: make it red?"}


def test_a_missing_source_is_told_with_its_line_before_a_run(tmp_path: Path) -> None:
    Image.fromarray(BLUE).save(tmp_path / "before.png")
    rows = [{"source": str(tmp_path / "before.png")}, {"source": str(tmp_path / "gone.png")}]
    with judging() as service:
        for reward in (YesNo(judge(service.url), show="edit"), EditScore(judge(service.url))):
            with pytest.raises(ValueError, match=r"line 2: .*'source' must be the path of a picture"):
                reward.validate(["a", "b"], rows)
            with pytest.raises(ValueError, match=r"line 1: .*needs the metadata \['source'\]"):
                reward.validate(["a"], [{}])


# -- EditScore


@pytest.mark.parametrize(
    ("text", "marks"),
    [
        ('{"reasoning": "ok", "score": [20, 15]}', (20.0, 15.0)),
        ('Sure!\n```json\n{"reasoning": "ok", "score": [20.5, 0]}\n```', (20.5, 0.0)),
        ('{"reasoning": "it says "hello" here", "score": [20, 15]}', (20.0, 15.0)),
        ("{'reasoning': 'ok', 'score': [20, 15]}", (20.0, 15.0)),
        ("score = [20, 15", None),
        ('{"score": [26, 15]}', None),
        ('{"score": [-1, 15]}', None),
        ('{"score": [20]}', None),
        ('{"score": [20, 15, 3]}', None),
        ('{"score": 20}', None),
        ('{"score": ["many", 15]}', None),
        ("I cannot help with that.", None),
    ],
)
def test_two_marks_are_read_from_json_or_what_is_left_of_it(text: str, marks: tuple[float, float] | None) -> None:
    assert marks_of(text, 25) == marks


def edited(tmp_path: Path) -> RewardBatch:
    Image.fromarray(BLUE).save(tmp_path / "before.png")
    return batch(RED, prompts=["make it red"], metadata=[{"source": str(tmp_path / "before.png")}])


def test_editscore_is_the_root_of_the_lower_marks_of_two_questions(tmp_path: Path) -> None:
    def answer(body: dict[str, Any]) -> Any:
        both = len(Seen.of(body).pictures) == 2
        return completion('{"score": [20, 10]}' if both else '{"score": [15, 25]}')

    with judging(answer) as service:
        out = masked(EditScore(judge(service.url)), edited(tmp_path))
    assert out.values.item() == pytest.approx(10 / 25 * math.sqrt(10 * 15))
    marks = (out.details[key][0] for key in ("prompt_following", "consistency", "quality"))
    assert tuple(marks) == (pytest.approx(8.0), pytest.approx(4.0), pytest.approx(6.0))
    sc, pq = sorted(service.asked, key=lambda seen: -len(seen.pictures))
    assert np.array_equal(sc.pictures[0], BLUE) and np.array_equal(sc.pictures[1], RED)  # before, after
    assert [np.array_equal(picture, RED) for picture in pq.pictures] == [True]  # the result alone
    assert "make it red" in sc.text and "make it red" not in pq.text and "from 0 to 25" in sc.text
    assert sc.body["seed"] == 42 and sc.body["temperature"] == 0.7


def test_passes_differ_by_seed_and_those_that_fail_are_left_out_of_the_mean(tmp_path: Path) -> None:
    def by_seed(body: dict[str, Any]) -> Any:
        marks = {42: "[25, 25]", 43: "no marks", 44: "[5, 25]"}[body["seed"]]
        return completion(f'{{"score": {marks}}}')

    with judging(by_seed) as service:
        out = masked(EditScore(judge(service.url), passes=3), edited(tmp_path))
    assert out.values.item() == pytest.approx((10 + 2) / 2)


def test_unread_marks_are_invalid_and_no_middle_of_the_scale(tmp_path: Path) -> None:
    with judging(lambda body: completion('{"score": [12', finish="length")) as service:
        out = masked(EditScore(judge(service.url)), edited(tmp_path))
    assert not out.valid.any() and out.values.isnan().all()
    assert "no two marks from 0 to 25" in out.details["error"][0] and "raise max_tokens" in out.details["error"][0]


def test_instructions_may_come_from_files(tmp_path: Path) -> None:
    (tmp_path / "sc.txt").write_text('Rate 0-{highest}: {prompt}. "score"')
    with judging() as service:
        reward = EditScore(judge(service.url), consistency=str(tmp_path / "sc.txt"))
        masked(reward, edited(tmp_path))
        assert 'Rate 0-25: make it red. "score"' in {seen.text for seen in service.asked}
        assert "Rate 0-25" in reward.fingerprint["instructions"]
    with pytest.raises(ValueError, match="no file of instructions at"):
        EditScore(judge(service.url), quality=str(tmp_path / "gone.txt")).fingerprint  # noqa: B018


# -- preference inside the group


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("<think>Image 2 is better at colours</think><answer>Image 1 is better</answer>", 1.0),
        ("<answer>image 2 is better</answer>", 0.0),
        ("<answer>Image 1 is better</answer> no: <answer>Image 2 is better</answer>", 0.0),
        ("Image 2 is the better one. So: Image 2 wins", 0.0),
        ("<answer>Both are equally good</answer>", 0.5),
        ("<answer>Tie</answer>", 0.5),
        ("Both show a ring.", None),
        ("<think>Image 1 is", None),
        ("", None),
    ],
)
def test_the_verdict_is_the_last_answer(text: str, share: float | None) -> None:
    assert verdict(text) == share


def test_the_win_rate_is_over_all_mates_in_both_orders() -> None:
    with judging() as service:
        reward = Preference(judge(service.url), size=0)
        out = masked(reward, batch(DARK, RED, BLUE, DARK, RED, groups=["p", "p", "p", "q", "q"]))
    assert out.values.tolist() == [0.5, 1.0, 0.0, 0.0, 1.0]  # for "red": RED over DARK over BLUE
    assert len(service.asked) == 6 + 2
    assert out.details["comparisons"] == [4, 4, 4, 2, 2] and out.details["consistent"] == [1.0] * 5


def test_a_judge_that_prefers_a_place_decides_nothing() -> None:
    with judging(lambda body: completion("<answer>Image 1 is better</answer>")) as service:
        out = masked(Preference(judge(service.url), size=0), batch(DARK, RED, BLUE, groups=["p"] * 3))
    assert out.values.tolist() == [0.5, 0.5, 0.5] and out.details["consistent"] == [0.0, 0.0, 0.0]


def test_comparisons_that_cannot_be_read_are_left_out_and_too_many_make_a_row_invalid() -> None:
    def silent_about_blue(body: dict[str, Any]) -> Any:
        blue = any(np.array_equal(picture, BLUE) for picture in Seen.of(body).pictures)
        return completion("hm", finish="length") if blue else sensible(body)

    with judging(silent_about_blue) as service:
        out = masked(Preference(judge(service.url), size=0), batch(DARK, RED, BLUE, groups=["p"] * 3))
    assert out.valid.tolist() == [True, True, False] and out.values[:2].tolist() == [0.0, 1.0]
    assert "no verdict in the reply 'hm'; it was cut" in out.details["error"][2]


def test_a_group_of_one_cannot_be_compared() -> None:
    with judging() as service:
        out = masked(Preference(judge(service.url), size=0), batch(RED, DARK, BLUE, groups=["p", "p", "q"]))
    assert out.valid.tolist() == [True, True, False] and "group of one" in out.details["error"][2]


# -- all of them


def every(url: str, **options: Any) -> list[Any]:
    return [kind(judge(url, **options)) for kind in (UnifiedReward, YesNo, EditScore, Preference)]


def asked_of(reward: Any, tmp_path: Path) -> RewardBatch:
    one = edited(tmp_path)
    return batch(RED, DARK, prompts=list(one.prompts) * 2, metadata=list(one.metadata) * 2, groups=["p", "p"])


@pytest.mark.parametrize("fault", [(500, {}), (503, {"error": {"message": "busy"}}), {"choices": []}, {}, [1]])
def test_a_passing_fault_of_the_server_is_retried(fault: Any, tmp_path: Path) -> None:
    for k in range(4):
        faults = [fault, fault]

        def flaky(body: dict[str, Any], faults: list[Any] = faults) -> Any:
            return faults.pop() if faults else sensible(body)

        with judging(flaky) as service:
            reward = every(service.url)[k]
            assert masked(reward, asked_of(reward, tmp_path)).valid.all(), reward.name
            assert reward.judge.transport.retries == 2


def test_a_lasting_fault_is_invalid_with_the_address_and_never_a_number(tmp_path: Path) -> None:
    with judging(lambda body: (500, {"error": {"message": "CUDA out of memory"}})) as service:
        for reward in every(service.url, deadline=1.0):
            out = masked(reward, asked_of(reward, tmp_path))
            assert not out.valid.any() and out.values.isnan().all()
            assert all(service.url in text and "CUDA out of memory" in text for text in out.details["error"])
        with pytest.raises(InvalidScoreError, match="CUDA out of memory"):
            Scorer(UnifiedReward(judge(service.url, tries=1)))(batch(RED))


def test_a_refused_request_is_not_repeated() -> None:
    with judging(lambda body: (400, {"error": {"message": "context too long"}})) as service:
        out = masked(UnifiedReward(judge(service.url)), batch(RED))
    assert "400 context too long" in out.details["error"][0] and len(service.asked) == 1


def test_a_server_that_only_answers_politely_is_found_out_at_the_start() -> None:
    """Every reply is a 200, none holds what was asked for, or all hold the same."""
    for said, reason in (("Final", "could not be scored"), ("Final Score: 3", "scored 1.2 instead of more than")):
        wrong = pytest.raises(KnownAnswerError, match=reason)
        with judging(lambda body, said=said: completion(said)) as service, wrong:
            known_answers.check(UnifiedReward(judge(service.url)))
    with judging() as service:
        for reward in every(service.url):
            known_answers.check(reward)


def test_a_server_of_another_model_or_none_is_told_before_a_run() -> None:
    with judging(models=("llama", "qwen")) as service:
        for reward in (UnifiedReward(judge(service.url)), YesNo(judge(service.url)), Preference(judge(service.url))):
            with pytest.raises(RemoteError, match="serves llama, qwen, not 'tiny-judge'"):
                reward.validate(["a"], [{}])
    began = time.monotonic()
    with pytest.raises(RemoteError, match=f"judge: {service.url}/models"):
        UnifiedReward(judge(service.url)).validate(["a"], [{}])
    assert time.monotonic() - began < 10


def test_a_key_is_sent_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "sk-1")
    made = judge("http://localhost:1/v1", key_variable="MY_KEY")
    assert made.transport.headers == {"authorization": "Bearer sk-1"}
    assert "sk-1" not in repr(made) and "sk-1" not in str(made.fingerprint)
    assert judge("http://localhost:1/v1", key_variable="NO_KEY").transport.headers == {}


def test_two_hundred_requests_from_several_threads_keep_their_places() -> None:
    from concurrent.futures import ThreadPoolExecutor

    with judging() as service:
        reward = UnifiedReward(judge(service.url, concurrency=8), size=0)
        pictures = [np.full((8, 8, 3), level, np.uint8) for level in range(0, 250, 10)]

        def ask(number: int) -> list[float]:
            return masked(reward, batch(*pictures[number:], *pictures[:number], prompts=["x"] * 25)).values.tolist()

        with ThreadPoolExecutor(8) as pool:
            rows = list(pool.map(ask, range(8)))
    straight = [(1 + 4 * taste(picture, "x")) / 5 for picture in pictures]
    for number, row in enumerate(rows):
        assert row == pytest.approx(straight[number:] + straight[:number], abs=1e-3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda j: YesNo(j, show="movie"), "show must be one of"),
        (lambda j: YesNo(j, combine="max"), "combine must be one of"),
        (lambda j: YesNo(j, questions=()), "needs a question"),
        (lambda j: YesNo(j, grid=(1, 1)), "two cells or more"),
        (lambda j: EditScore(j, passes=0), "at least 1"),
        (lambda j: Judge("ftp://x", "m"), "http://host:port"),
        (lambda j: Judge("http://x", "m", concurrency=0), "at least 1"),
    ],
)
def test_wrong_options_are_refused(make: Callable[[Judge], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(judge("http://localhost:1/v1"))
