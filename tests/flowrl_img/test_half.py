"""Gradients of float16 networks: those of float32 but for rounding, however many points an update has."""

import pytest
import torch

from flowrl_img.half import HalfBackward

D = 4096
MANY = 2.0**20  # points of an update, by which every loss is divided
RUN = {"rollouts": 1, "updates_per_rollout": 1}


@pytest.fixture
def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(D, 8), torch.nn.Tanh(), torch.nn.Linear(8, D))


def loss_of(network, dtype, size=1.0):
    """A mean over latent elements, summed over rows, of an output in `dtype`."""
    x = torch.randn(3, D, generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        v = network(x)
    assert v.dtype == dtype
    return size * (v.float() - x).square().mean(1).sum()


def gradients(network):
    return [p.grad.clone() for p in network.parameters()]


@pytest.mark.parametrize("size", [1e-4, 1.0, 1e3])
def test_gradients_survive_the_range_of_float16(network, size):
    (loss_of(network, torch.float32, size) / MANY).backward()
    expected = gradients(network)
    network.zero_grad()
    (loss_of(network, torch.float16, size) / MANY).backward()
    if size == 1.0:
        assert all(g.abs().max() == 0 for g in gradients(network)), "nothing to save: the plain pass does not underflow"
    network.zero_grad()
    backward = HalfBackward(network, network.parameters(), D)
    for _ in range(2):  # micro-batches add up, whatever each was scaled by
        backward(loss_of(network, torch.float16, size / 2), MANY)
    for found, wanted in zip(gradients(network), expected, strict=True):
        assert (found - wanted).norm() < 1e-2 * wanted.norm()


def test_no_gradient_is_zero_and_not_a_division_by_it(network):
    HalfBackward(network, network.parameters(), D)(loss_of(network, torch.float16, 0.0), MANY)
    assert all(g.abs().max() == 0 for g in gradients(network))


@pytest.mark.parametrize("objective", [{"name": "nft", "beta": 0.3}, {"name": "flow_grpo", "clip_range": 1e-2}])
def test_a_float16_run_has_the_gradient_of_float32_at_published_sizes(tiny_trainer, tiny_folder, objective):
    """The tiny model has 256 elements in a latent, so the count of points is what makes gradients small here."""
    found = {}
    for dtype in ("fp32", "fp16"):
        model = {"path": str(tiny_folder), "dtype": dtype}
        trainer = tiny_trainer(
            model=model, objective=objective, run=RUN, rewards=[{"name": "sample_rewards:brightness"}]
        )
        points = trainer.points(trainer.collect(0))
        plain = trainer.processes.sum
        trainer.processes.sum = lambda value, plain=plain: plain(value) * MANY
        trainer._zero_grad()
        trainer.accumulate(points, 0)
        found[dtype] = MANY * torch.cat([p.grad.flatten() for p in trainer.parameters])
    assert found["fp32"].abs().max() > 0
    assert torch.nn.functional.cosine_similarity(found["fp16"], found["fp32"], dim=0) > 0.98
    assert found["fp16"].norm() == pytest.approx(float(found["fp32"].norm()), rel=0.1)
