import pytest
import torch

from flowrl_img.decays import Constant, Copy, Delayed, Linear, Warmup

PUBLISHED = {
    "ema_decay_0.9": Warmup(0.9),
    "ema_decay_0.99": Warmup(0.99),
    "ema_decay_0.9999": Warmup(0.9999),
    "nft_return_decay_type0": Copy(),
    "nft_return_decay_type1": Linear(0.001, 0.5),
    "nft_return_decay_type2": Delayed(75, 0.0075, 0.999),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_schedules_are_met_at_every_step(golden, name):
    case = golden("ema", name)
    decay = PUBLISHED[name]
    case.check("decay", torch.tensor([decay(s) for s in case["step"].tolist()], dtype=torch.float64))


@pytest.mark.parametrize("wrong", [(Constant, 1.0), (Warmup, -0.1), (Linear, 0.1, 1.0), (Linear, -1), (Delayed, -1)])
def test_a_set_that_could_never_follow_is_refused(wrong):
    kind, *values = wrong
    with pytest.raises(ValueError, match=r"must be in \[0, 1\)|must be 0 or more"):
        kind(*values)
