"""Windows are pure functions of (seed, iteration), stay in range, slide and wrap."""

import pytest

from flowrl_img.samplers.windows import AllSteps, ListedSteps, ProgressiveWindow, RandomWindow

CHOICES = [AllSteps(), ListedSteps((1, 4)), RandomWindow(2, (1, 6), every=2), ProgressiveWindow(2, (1, 6), every=3)]


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
    assert [strided.steps(6, seed=0, iteration=i) for i in range(3)] == [(0, 1), (2, 3), (4, 5)]


@pytest.mark.parametrize("kind", [RandomWindow, ProgressiveWindow])
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
