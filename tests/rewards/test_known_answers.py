"""A reward that contradicts its own examples is refused before a run."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tiny_models

from flowrl_img.rewards import jpeg, known_answers, ocr, registry
from flowrl_img.rewards.detectors.scenes import Scenes
from flowrl_img.rewards.geneval import GenEval
from flowrl_img.rewards.known_answers import Better, Example, KnownAnswerError, Scores, check, matching
from flowrl_img.rewards.protocol import RewardBatch, RewardOutput

BLACK, WHITE = (np.full((4, 4, 3), level, np.uint8) for level in (0, 255))
PICTURES = {"white": WHITE, "black": BLACK}


class Brightness:
    """The mean level times `gain`, in [0, 1]; None is a failure."""

    name = "brightness"
    needs: frozenset[str] = frozenset()

    def __init__(self, gain: float | None = 1.0) -> None:
        self.gain = gain

    def validate(self, prompts: Any, metadata: Any) -> None: ...

    def known_answers(self) -> Sequence[known_answers.KnownAnswer]:
        white, black = Example("a white picture", WHITE), Example("a black picture", BLACK)
        return [Better((white,), (black,)), Scores(white, low=0.9, high=1.0)]

    def __call__(self, batch: RewardBatch) -> RewardOutput:
        values = [None if self.gain is None else self.gain * float(i.float().mean()) / 255 for i in batch.images]
        return RewardOutput.of(values, {"error": ["no lamp" if v is None else None for v in values]})


@pytest.mark.parametrize(
    ("gain", "message"),
    [
        (0.0, "reward 'brightness' .* a white picture scored 0 instead of more than a black picture, which scored 0"),
        (-1.0, "a white picture scored -1 instead of more than a black picture"),
        (0.5, r"a white picture scored 0\.5 instead of 0\.9 to 1"),
        (None, "a white picture could not be scored: no lamp"),
    ],
)
def test_a_broken_scorer_is_refused_with_the_picture_and_both_scores(gain: float | None, message: str) -> None:
    check(Brightness())
    with pytest.raises(KnownAnswerError, match=message):
        check(Brightness(gain))


def test_a_reward_that_states_nothing_passes() -> None:
    check(registry.FunctionReward(lambda images, prompts, metadata: [0.0] * len(images), "zero"))


class Constant(Brightness):
    """Any bound that leaves room lets a constant pass."""

    def known_answers(self) -> Sequence[known_answers.KnownAnswer]:
        return [Scores(Example(f"a {word} picture", image), 0.0, 11.0) for word, image in PICTURES.items()]

    def __call__(self, batch: RewardBatch) -> RewardOutput:
        return RewardOutput.of([5.0] * len(batch))


def test_one_score_for_all_examples_is_refused() -> None:
    with pytest.raises(KnownAnswerError, match="its 2 examples all scored 5"):
        check(Constant())


def test_pictures_are_asked_with_each_others_prompts() -> None:
    answer = matching(Example("a white picture", WHITE, "white"), Example("a black picture", BLACK, "black"))
    assert [(e.what, e.prompt) for e in answer.bad] == [
        ("a white picture asked for 'black'", "black"),
        ("a black picture asked for 'white'", "white"),
    ]
    assert answer.contradiction([0.9, 0.1, 0.5, 0.4]) is None  # a liking for white does not count
    assert "scored 0.9 instead of more than a white picture asked for" in str(
        answer.contradiction([0.5, 0.4, 0.9, 0.1])
    )


class Contest(Brightness):
    """A groupwise reward: the share of the group that is darker."""

    scope = "group"

    def __call__(self, batch: RewardBatch) -> RewardOutput:
        levels = batch.images.float().mean(dim=(1, 2, 3))
        return RewardOutput.of(((levels[:, None] > levels).float().sum(1) / max(len(batch) - 1, 1)).tolist())


def test_a_groupwise_reward_sees_the_pictures_of_one_answer_together() -> None:
    white, black = (Example(f"a {word} picture", image) for word, image in PICTURES.items())
    reward = Contest()
    reward.known_answers = lambda: [Better((white,), (black,))]  # type: ignore[method-assign]
    check(reward)
    reward.known_answers = lambda: [Better((black,), (white,))]  # type: ignore[method-assign]
    with pytest.raises(KnownAnswerError, match="a black picture scored 0 instead of more than a white picture"):
        check(reward)


@pytest.mark.parametrize("name", registry.builtins())
def test_every_built_in_states_answers_keeps_them_and_is_quick(name: str) -> None:
    reward = registry.load(name, **tiny_models.options(name))
    assert isinstance(reward, known_answers.StatesAnswers) and reward.known_answers()
    check(reward)  # the first use loads engines and templates, which a run needs anyway
    began = time.process_time()
    check(reward)
    assert time.process_time() - began < 1.0


@pytest.mark.parametrize("options", [{}, {"mode": "strict"}, {"mode": "benchmark"}, {"compat": "flow_grpo"}])
def test_geneval_keeps_its_answers_in_every_mode(options: dict[str, str]) -> None:
    check(GenEval(**options))


@pytest.mark.parametrize("quality", [1, 50, 95])
@pytest.mark.parametrize("mode", list(jpeg.MODES))
def test_jpeg_keeps_its_answers_in_both_directions(mode: str, quality: int) -> None:
    check(jpeg.Jpeg(mode, quality))


@pytest.mark.parametrize("mode", list(ocr.MODES))
def test_ocr_keeps_its_answers_in_both_modes(mode: str) -> None:
    check(ocr.Ocr(mode))


class Blind(Scenes):
    """A detector whose weights did not load."""

    def detect(self, images: Sequence[Any]) -> list[list[Any]]:
        return [[] for _ in images]


class ColorBlind(Scenes):
    def classify(self, image: Any, detections: Sequence[Any], label: str) -> list[str]:
        return ["white"] * len(detections)


@pytest.fixture
def my_detectors(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("my_detectors")
    module.Blind, module.ColorBlind = Blind, ColorBlind
    monkeypatch.setitem(sys.modules, "my_detectors", module)


def test_a_detector_that_finds_nothing_is_refused(my_detectors: None) -> None:
    with pytest.raises(KnownAnswerError, match=r"a picture of .*heart.* scored 0 instead of 1\."):
        check(GenEval(detector="my_detectors:Blind", colors="my_detectors:Blind"))


def test_colours_are_asked_of_a_detector_that_names_them_itself_and_of_no_other(my_detectors: None) -> None:
    with pytest.raises(KnownAnswerError, match="'color': 'red'"):
        check(GenEval(detector="my_detectors:ColorBlind", colors="my_detectors:ColorBlind"))
    check(GenEval(colors="my_detectors:ColorBlind"))


def test_an_engine_that_reads_nothing_or_always_the_same_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ocr, "read_text", lambda image: "")
    with pytest.raises(KnownAnswerError, match=r"sign HEN7, asked for HEN7, scored 0 instead of at least 0\.75"):
        check(ocr.Ocr())
    monkeypatch.setattr(ocr, "read_text", lambda image: "HEN7")
    with pytest.raises(KnownAnswerError, match="a blank picture, asked for HEN7, scored 1 instead of at most 0"):
        check(ocr.Ocr())
