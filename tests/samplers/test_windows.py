"""Windows are pure functions of (seed, iteration), stay in range, slide and wrap."""

import itertools
from functools import partial

import pytest

from flowrl_img.samplers.windows import (
    AllSteps,
    DecayWindow,
    ExponentialWindow,
    ListedSteps,
    ProgressiveWindow,
    RandomWindow,
)

CHOICES = [
    AllSteps(),
    ListedSteps((1, 4)),
    RandomWindow(2, (1, 6), every=2),
    ProgressiveWindow(2, (1, 6), every=3),
    DecayWindow(2, (1, 6), longest=4, shortest=1),
    ExponentialWindow(2, (1, 6), longest=3, rate=0.5, knee=2),
]


@pytest.mark.parametrize("choice", CHOICES, ids=lambda c: type(c).__name__)
def test_equal_arguments_give_equal_steps_whatever_was_asked_before(choice):
    forward = [choice.steps(10, seed=3, iteration=i) for i in range(12)]
    backward = [choice.steps(10, seed=3, iteration=i) for i in reversed(range(12))]
    assert forward == backward[::-1]
    assert all(list(steps) == sorted(set(steps)) and steps for steps in forward)


def test_all_steps_leave_out_the_last():
    assert AllSteps().steps(10, seed=0, iteration=0) == tuple(range(9))
    assert AllSteps(skip_last=0).steps(3, seed=0, iteration=0) == (0, 1, 2)


def test_listed_steps_are_returned_in_order():
    assert ListedSteps((4, 1)).steps(5, seed=0, iteration=7) == (1, 4)


def test_a_random_window_visits_every_start_about_equally_often():
    window = RandomWindow(size=3, range=(1, 7))
    starts = [window.steps(10, seed=0, iteration=i)[0] for i in range(800)]
    counts = [starts.count(s) for s in range(10)]
    assert sum(counts[1:5]) == 800
    assert min(counts[1:5]) > 160  # 200 expected, standard deviation 12: more than 3 of them away fails


def test_a_random_window_depends_on_the_seed_and_holds_still_for_every_iterations():
    window = RandomWindow(size=1, range=(0, 1000), every=5)
    starts = [window.steps(1000, seed=0, iteration=i) for i in range(50)]
    assert [len(set(starts[i : i + 5])) for i in range(0, 50, 5)] == [1] * 10
    assert len(set(starts)) > 5
    assert starts != [window.steps(1000, seed=1, iteration=i) for i in range(50)]


def test_a_progressive_window_slides_and_wraps():
    window = ProgressiveWindow(size=2, range=(1, 5), every=2)
    assert [window.steps(5, seed=9, iteration=i)[0] for i in range(8)] == [1, 1, 2, 2, 3, 3, 1, 1]
    strided = ProgressiveWindow(size=2, range=(0, 6), stride=2)
    assert [strided.steps(6, seed=0, iteration=i) for i in range(6)] == [(0, 1), (2, 3), (4, 5)] * 2
    uneven = ProgressiveWindow(size=2, range=(1, 7), stride=3)
    assert [uneven.steps(7, seed=0, iteration=i) for i in range(4)] == [(1, 2), (4, 5)] * 2


def visits(window, num_steps, iterations):
    """(start, how many iterations in a row) of a window, from iteration 0."""
    starts = [window.steps(num_steps, seed=0, iteration=i)[0] for i in range(iterations)]
    return [(start, len(list(run))) for start, run in itertools.groupby(starts)]


def test_a_decay_window_stays_longer_among_the_noisy_steps_and_wraps():
    # p = 0, 1/4, 2/4, 3/4 of [0, 4): floor(8 - 6 p), at least 2
    window = DecayWindow(size=1, range=(0, 4), longest=8, shortest=2)
    assert visits(window, 4, 44) == [(0, 8), (1, 6), (2, 5), (3, 3)] * 2
    strided = DecayWindow(size=2, range=(1, 7), longest=3, shortest=3, stride=2)
    assert visits(strided, 7, 9) == [(1, 3), (3, 3), (5, 3)]


def test_an_exponential_window_stays_equally_long_up_to_its_knee():
    # 10 e^(-0.5 (l - 2)): 10, 10, 10, 6.07, 3.68
    window = ExponentialWindow(size=1, range=(0, 5), longest=10, rate=0.5, knee=2)
    assert visits(window, 5, 41) == [(0, 10), (1, 10), (2, 10), (3, 7), (4, 4)]
    steep = ExponentialWindow(size=1, range=(1, 4), longest=10, rate=1e4, knee=0)
    assert visits(steep, 4, 6) == [(1, 1), (2, 1), (3, 1)] * 2


@pytest.mark.parametrize(
    "kind", [RandomWindow, ProgressiveWindow, partial(DecayWindow, longest=3), partial(ExponentialWindow, longest=2)]
)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_windows_fill_their_range_and_never_leave_it(kind, size):
    seen = {step for i in range(200) for step in kind(size, (2, 6)).steps(8, seed=1, iteration=i)}
    assert seen == {2, 3, 4, 5}


@pytest.mark.parametrize(
    "make",
    [
        lambda: RandomWindow(5, (0, 4)),
        lambda: ProgressiveWindow(3, (2, 4)),
        lambda: RandomWindow(0, (0, 4)),
        lambda: RandomWindow(1, (-1, 4)),
        lambda: RandomWindow(2, (0, 9)).steps(8, seed=0, iteration=0),
        lambda: ProgressiveWindow(1, (0, 4), stride=0),
        lambda: DecayWindow(2, (0, 4), longest=1, shortest=2),
        lambda: DecayWindow(2, (0, 4), longest=1, stride=0),
        lambda: DecayWindow(2, (0, 4), longest=1, shortest=0),
        lambda: DecayWindow(2, (0, 9), longest=1).steps(8, seed=0, iteration=0),
        lambda: ExponentialWindow(2, (0, 4), longest=0),
        lambda: ExponentialWindow(2, (0, 4), longest=1, rate=-1.0),
        lambda: ExponentialWindow(2, (0, 4), longest=1, stride=0),
        lambda: AllSteps(skip_last=4).steps(4, seed=0, iteration=0),
        lambda: AllSteps(skip_last=-1),
        lambda: ListedSteps(()),
        lambda: ListedSteps((1, 1)),
        lambda: ListedSteps((0, 8)).steps(8, seed=0, iteration=0),
    ],
)
def test_impossible_choices_are_refused(make):
    with pytest.raises(ValueError):
        make()
