import pytest
import torch

from flowrl_img.kernels.logprob import DeterministicStepError
from flowrl_img.samplers.fork import fork, fork_calls
from flowrl_img.samplers.loop import sample
from flowrl_img.samplers.schedules import flow_match_sigmas
from flowrl_img.samplers.steps.cps import CPS
from flowrl_img.samplers.steps.flow_sde import FlowSDE

SIGMAS = flow_match_sigmas(6)
X = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
ANCHORS, K = (0, 2, 4), 3


def velocity(x, sigma):
    return torch.tanh(x) * (1 + sigma)


def noise(step):
    return torch.randn(2, K, 3, 4, generator=torch.Generator().manual_seed(step))


def forked(calls=None):
    def laned(x, lane, step, sigma):
        if calls is not None:
            calls.append((step, len(x), lane.tolist()))
        return velocity(x, sigma)

    return fork(laned, X, SIGMAS, FlowSDE(0.7), ANCHORS, K, noise)


@pytest.mark.parametrize("anchor", ANCHORS)
def test_every_successor_is_the_walk_that_is_stochastic_at_its_fork_alone(anchor):
    found = forked()
    for k in range(K):
        walk = sample(
            lambda x, i, sigma: velocity(x, sigma), X, SIGMAS, FlowSDE(0.7), (anchor,), lambda i, k=k: noise(i)[:, k],
            keep=(anchor,),
        )  # fmt: skip
        assert torch.equal(found.anchors[anchor].x_t, walk.kept[anchor].x_t)
        assert torch.equal(found.anchors[anchor].v, walk.kept[anchor].v)
        torch.testing.assert_close(found.anchors[anchor].x_s[:, k], walk.kept[anchor].x_s, rtol=0, atol=1e-6)
        torch.testing.assert_close(found.x0[anchor][:, k], walk.x0, rtol=0, atol=1e-5)


def test_the_trunk_is_evaluated_once_a_step_and_stops_after_the_last_fork():
    calls = []
    forked(calls)
    assert [n for _, n, _ in calls] == [2, 2 + 6, 2 + 6, 2 + 12, 2 + 12, 18]
    assert sum(n for _, n, _ in calls) == 2 * fork_calls(6, ANCHORS, K)
    assert calls[1][2] == [0, 1, 0, 0, 0, 1, 1, 1]


def test_the_cost_of_published_tempflow_is_met():
    assert fork_calls(10, range(9), 6) == 279


def test_forks_without_noise_or_outside_the_grid_are_refused():
    with pytest.raises(DeterministicStepError, match="std 0"):
        fork(lambda x, *_: x, X, SIGMAS, CPS(0.8), (5,), K, noise)
    with pytest.raises(ValueError, match="fork at steps"):
        fork(lambda x, *_: x, X, SIGMAS, FlowSDE(), (6,), K, noise)
    with pytest.raises(ValueError, match="velocity at step 0"):
        fork(lambda x, *_: x[:1], X, SIGMAS, FlowSDE(), (1,), K, noise)
