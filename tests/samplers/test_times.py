import pytest
import torch

from flowrl_img import plugins
from flowrl_img.samplers.schedules import flow_match_sigmas
from flowrl_img.samplers.times import Grid, LogitNormal, Strata, Uniform

TEN, FOURTEEN = flow_match_sigmas(10), flow_match_sigmas(14)


def steps_of(times, sigmas) -> list[int]:
    return [sigmas.tolist().index(t) for t in times.tolist()]


@pytest.mark.parametrize("name", plugins.available("times"))
def test_every_law_draws_the_same_times_for_the_same_seed_within_the_unit_interval(name):
    law = plugins.build("times", {"name": name})
    draws = [law.draw(TEN, seed) for seed in (1, 1, 2, 3, 4)]
    assert torch.equal(draws[0], draws[1])
    assert len({tuple(d.tolist()) for d in draws[1:]}) > 1
    for times in draws:
        assert times.dtype == torch.float64
        assert times.shape == (law.num_times(10),)
        assert (times > 0).all() and (times <= 1).all()


def test_a_grid_law_skips_one_random_step_by_default():
    drawn = [steps_of(Grid().draw(TEN, seed), TEN) for seed in range(200)]
    assert all(len(set(steps)) == 9 for steps in drawn)
    skipped = [next(iter(set(range(10)) - set(steps))) for steps in drawn]
    assert set(skipped) == set(range(10))


def test_a_clipped_grid_stays_at_the_noisy_end_and_visits_every_step():
    drawn = [steps_of(Grid(4, high=7).draw(TEN, seed), TEN) for seed in range(100)]
    assert {len(set(steps)) for steps in drawn} == {4}
    assert {step for steps in drawn for step in steps} == set(range(7))


def test_the_parts_of_published_awm_are_met():
    """14 steps, 6 draws: boundaries 1, 2, 4, 6, 8, 10, 12."""
    drawn = [steps_of(Strata(6, low=1, high=12).draw(FOURTEEN, seed), FOURTEEN) for seed in range(300)]
    parts = [set(range(a, b)) for a, b in ((1, 2), (2, 4), (4, 6), (6, 8), (8, 10), (10, 12))]
    assert [{steps[k] for steps in drawn} for k in range(6)] == parts


def test_the_first_step_can_be_one_of_the_draws():
    steps = steps_of(Strata(6, low=1, high=12, first=True).draw(FOURTEEN, 0), FOURTEEN)
    assert steps[0] == 0
    assert len(steps) == 6


@pytest.mark.parametrize("law", [Uniform(8, 0.2, 1.0, 3.0), LogitNormal(8)])
def test_continuous_laws_are_stratified(law):
    """Sorted draws of two seeds lie in the same parts: the k-th of one is below the (k+1)-th part of the other."""
    draws = torch.stack([law.draw(TEN, seed) for seed in range(500)])
    assert (draws.diff(dim=1) > 0).all()
    assert (draws[:, :-1].max(0).values <= draws[:, 1:].min(0).values + 1e-9).all()


def test_the_mean_of_a_law_is_that_of_its_formula():
    shifted = torch.linspace(0.2, 1.0, 100_001, dtype=torch.float64)
    expected = (3 * shifted / (1 + 2 * shifted)).mean()
    found = torch.cat([Uniform(16, 0.2, 1.0, 3.0).draw(TEN, seed) for seed in range(200)]).mean()
    assert found.item() == pytest.approx(expected.item(), abs=1e-3)
    normal = LogitNormal(16, shift=1.0)
    found = torch.cat([normal.draw(TEN, seed) for seed in range(200)])
    assert found.mean().item() == pytest.approx(0.5, abs=1e-3)
    assert torch.logit(found).std().item() == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Grid(11).num_times(10), lambda: Grid(1, low=10).num_times(10), lambda: Grid(0), lambda: Grid(1, -1),
        lambda: Grid(2, high=11).num_times(10), lambda: Strata(12).num_times(10), lambda: Strata(0),
        lambda: Strata(3, first=True), lambda: Uniform(low=0.0), lambda: Uniform(shift=0), lambda: LogitNormal(std=0),
        lambda: LogitNormal(count=0),
    ],
)  # fmt: skip
def test_impossible_laws_are_refused(make):
    with pytest.raises(ValueError):
        make()
