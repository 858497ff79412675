"""Guidance and the blend of two models: exact at its ends, equal to scoring's own guidance, and to published code."""

import pytest
import torch

from flowrl_img.kernels.guidance import guided_velocity
from flowrl_img.kernels.guidance_torch import guide
from flowrl_img.kernels.transition import DOLD2, transition_moments


@pytest.fixture(autouse=True)
def _reference_body(monkeypatch):
    monkeypatch.setenv("FLOWRL_KERNELS", "torch")


def branches(dtype=torch.bfloat16, seed=0):
    """v_cond, v_uncond, base_cond, base_uncond."""
    return torch.randn(4, 2, 4, 9, 7, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("guidance", [4.5, 3.3, 1.0])
def test_it_is_the_velocity_that_scoring_forms_to_the_bit(dtype, guidance):
    c, u, x, _ = branches(dtype)
    v = guided_velocity(c, u, guidance)
    moments = transition_moments(c, u, guidance, x, x, torch.ones(2), torch.ones(2), v_old=v)
    assert torch.equal(v, guide(c, u, guidance))
    assert not moments[:, DOLD2:].any()


@pytest.mark.parametrize("guided", [False, True])
def test_weight_zero_is_the_base_and_one_is_the_tuned_model_exactly(guided):
    c, u, base, base_u = branches()
    tuned_branches, base_branches = ((c, u), (base, base_u)) if guided else ((c, None), (base, None))
    sides = {"base_cond": base_branches[0], "base_uncond": base_branches[1]}
    assert torch.equal(guided_velocity(*tuned_branches, 4.5, **sides, weight=0.0), guide(*base_branches, 4.5))
    assert torch.equal(guided_velocity(*tuned_branches, 4.5, **sides, weight=1.0), guide(*tuned_branches, 4.5))


def test_a_side_of_weight_zero_is_not_read():
    c, u, base, base_u = branches()
    broken = torch.full_like(c, torch.nan)
    assert guided_velocity(broken, u, 4.5, base_cond=base, base_uncond=base_u, weight=0.0).isfinite().all()
    assert guided_velocity(c, u, 4.5, base_cond=broken, base_uncond=base_u, weight=1.0).isfinite().all()


@pytest.mark.parametrize("name", ["rlg_cfg4.5", "rlg_nocfg", "rlg_nocfg_packed_f32"])
def test_the_blend_is_that_of_published_code(golden, name):
    case = golden("rlg", name)
    uncond, base_uncond = (case.tensors.get(f"v_uncond_{side}") for side in ("tuned", "base"))
    blended = [
        guided_velocity(
            case["v_cond_tuned"],
            uncond,
            case.scalars["guidance_scale"],
            base_cond=case["v_cond_base"],
            base_uncond=base_uncond,
            weight=w,
        )
        for w in case.scalars["w"]
    ]
    case.check("v", torch.stack(blended))


def test_equal_models_blend_to_themselves_at_any_weight():
    c, u, *_ = branches()
    for weight in (0.3, 1.6, 3.0):
        assert torch.equal(guided_velocity(c, u, 4.5, base_cond=c, base_uncond=u, weight=weight), guide(c, u, 4.5))


@pytest.mark.parametrize("arguments", [{"weight": 1.6}, {"base_uncond": torch.zeros(2, 4, 9, 7)}])
def test_a_blend_without_its_base_is_refused(arguments):
    with pytest.raises(ValueError, match="pass base_cond"):
        guided_velocity(branches()[0], **arguments)
