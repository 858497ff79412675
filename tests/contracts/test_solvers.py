"""What every solver keeps: it moves clean image and noise to the right level, and says so with its scalars alone."""

from __future__ import annotations

import pytest
import torch
from gaussian_target import line

from flowrl_img import plugins
from flowrl_img.samplers.schedules import dpm_flow_sigmas, flow_match_sigmas
from flowrl_img.samplers.solve import solve

SOLVERS = {name: plugins.build("solvers", {"name": name}) for name in plugins.available("solvers")}
GRIDS = {"sd3": flow_match_sigmas(10), "dpm": dpm_flow_sigmas(7), "inside": line(5, 0.9, 0.3), "one": line(1)}


def test_the_known_solvers_are_found():
    assert set(SOLVERS) >= {"euler", "heun", "dpm2", "dpm2_published", "sa"}


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("name", SOLVERS)
def test_every_step_moves_a_known_image_and_its_noise_to_the_next_level(name, grid):
    sigmas = GRIDS[grid]
    t, s = sigmas[:-1], sigmas[1:]
    table = SOLVERS[name].coefficients(sigmas)
    for scalars in (table.keep, table.predictor, table.std, table.corrector):
        assert scalars.isfinite().all()
        assert scalars.dtype == torch.float64
    torch.testing.assert_close(table.keep * (1 - t) + table.predictor.sum(1), 1 - s, rtol=0, atol=1e-12)
    torch.testing.assert_close((table.keep * t) ** 2 + table.std**2, s**2, rtol=1e-12, atol=1e-15)
    for i in (i for i in range(len(s)) if table.corrects(i)):
        assert float(table.keep[i] * (1 - t[i]) + table.corrector[i].sum()) == pytest.approx(1 - float(s[i]), abs=1e-12)


@pytest.mark.parametrize("name", SOLVERS)
def test_no_step_uses_a_prediction_it_does_not_have_yet(name):
    table = SOLVERS[name].coefficients(line(5, 0.9, 0.3))
    assert not table.predictor[0, 1:].any()
    assert not table.corrector[0, 2:].any()


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("name", SOLVERS)
def test_the_network_is_never_called_at_sigma_zero_and_always_at_its_step(name, grid):
    sigmas, calls = GRIDS[grid], []
    solve(
        lambda x, i, sigma: (calls.append((i, sigma)), torch.tanh(x))[1],
        torch.ones(2, 3),
        sigmas,
        SOLVERS[name],
        lambda i: torch.ones(2, 3),
    )
    assert all(sigma == float(sigmas[i]) > 0 for i, sigma in calls)
    assert {i for i, _ in calls} >= set(range(len(sigmas) - 1))
    assert len(calls) == SOLVERS[name].coefficients(sigmas).network_calls
