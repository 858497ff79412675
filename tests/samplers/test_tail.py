"""The Flash tail: published numbers of steps, levels even before the shift, and an untouched trained part."""

import pytest
import torch
from gaussian_target import exact_state, exact_velocity

from flowrl_img.samplers.loop import sample
from flowrl_img.samplers.schedules import flow_match_sigmas
from flowrl_img.samplers.solvers.euler import Euler
from flowrl_img.samplers.solvers.sa import SASolver
from flowrl_img.samplers.steps.flow_sde import FlowSDE
from flowrl_img.samplers.steps.ode import ODE
from flowrl_img.samplers.tail import FlashTail, sample_with_tail


def shifted(u, shift=3.0):
    return shift * u / (1 + (shift - 1) * u)


PUBLISHED = shifted(torch.linspace(1, 0, 26, dtype=torch.float64))  # 25 steps, shift 3


def normal(key):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(key))


@pytest.mark.parametrize(
    ("last", "ratio", "num_steps"), [(3, 0.4, 7), (10, 0.4, 5), (3, 0.2, 3), (22, 0.4, 1), (3, 1.0, 21)]
)
def test_the_tail_has_the_published_number_of_steps(last, ratio, num_steps):
    """int((25 - last) * ratio) nodes, both ends counted, so one step fewer; at least one, down to sigma 0."""
    levels = FlashTail(ratio).sigmas(PUBLISHED, last)
    assert len(levels) == num_steps + 1
    assert levels[0] == PUBLISHED[last + 1]
    assert levels[-1] == 0


def test_levels_are_even_before_the_shift():
    levels = FlashTail(0.4).sigmas(PUBLISHED, 3)
    expected = shifted(torch.linspace(21 / 25, 0, 8, dtype=torch.float64))
    torch.testing.assert_close(levels, expected, rtol=0, atol=1e-12)


def test_without_shift_levels_are_even():
    levels = FlashTail(0.5, shift=1.0).sigmas(PUBLISHED, 5)
    torch.testing.assert_close(levels.diff(), levels.diff()[:1].expand(len(levels) - 1), rtol=1e-12, atol=0)


def test_the_trained_part_is_that_of_the_full_rollout_bit_for_bit():
    sigmas, steps = flow_match_sigmas(12), (2, 3, 4)
    arguments = (lambda x, i, s: torch.tanh(x) - s, normal(0), sigmas, FlowSDE(0.7), steps, lambda i: normal(10 + i))
    full, short = sample(*arguments, keep=steps), sample_with_tail(*arguments, FlashTail(0.5), keep=steps)
    assert set(short.kept) == set(steps)
    for step in steps:
        assert torch.equal(full.kept[step].x_s, short.kept[step].x_s)
        assert torch.equal(full.kept[step].v, short.kept[step].v)
    assert not torch.equal(full.x0, short.x0)


def test_the_tail_calls_the_network_as_often_as_it_has_steps():
    calls = []
    sample_with_tail(
        lambda x, i, s: (calls.append((i, s)), torch.tanh(x))[1],
        normal(0),
        PUBLISHED,
        FlowSDE(0.7),
        (0, 1, 2, 3),
        normal,
        FlashTail(0.4),
    )
    assert [i for i, _ in calls] == list(range(4 + 7))
    assert [s for _, s in calls[4:]] == FlashTail(0.4).sigmas(PUBLISHED, 3)[:-1].tolist()


def test_the_second_order_tail_is_closer_to_the_exact_flow_than_an_euler_tail_of_the_same_levels():
    x_1 = torch.tensor([[-1.0], [0.5], [2.0]], dtype=torch.float64)
    after_window = sample(exact_velocity, x_1, PUBLISHED[:5], ODE(), (), lambda i: x_1).x0
    truth = exact_state(after_window, float(PUBLISHED[4]), 0.0)
    errors = []
    for tail in (FlashTail(0.4), FlashTail(0.4, solver=Euler())):
        walk = sample_with_tail(exact_velocity, x_1, PUBLISHED, ODE(), (3,), lambda i: torch.zeros_like(x_1), tail)
        errors.append((walk.x0 - truth).abs().max().item())
    assert errors[0] < 0.85 * errors[1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FlashTail(0.0), "ratio"),
        (lambda: FlashTail(0.4, shift=0.0), "shift"),
        (lambda: FlashTail().sigmas(PUBLISHED, 24), "end the window earlier"),
        (lambda: FlashTail().sigmas(PUBLISHED, -1), "end the window earlier"),
        (lambda: sample_with_tail(exact_velocity, normal(0), PUBLISHED, ODE(), (), normal, FlashTail()), "use `solve`"),
        (lambda: FlashTail(solver=SASolver(0.4)), "adds no noise"),
        (lambda: FlashTail(solver=SASolver(0.4, (0.913, 0.914))), "adds no noise"),
    ],
)
def test_impossible_tails_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
