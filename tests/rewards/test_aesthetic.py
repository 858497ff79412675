"""The linear head on CLIP's embedding; the published file where it is present."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import tiny_models
import torch
from torch import nn

from flowrl_img.rewards.aesthetic import Aesthetic, load_head
from flowrl_img.rewards.pretrained import WeightsError
from flowrl_img.rewards.score import score

PUBLISHED = Path(os.environ.get("FLOWRL_IMG_AESTHETIC_HEAD", "sac+logos+ava1-l14-linearMSE.pth"))


def with_dropout() -> nn.Sequential:
    """The published module, dropouts in place."""
    layers = [nn.Linear(768, 1024), nn.Dropout(0.2), nn.Linear(1024, 128), nn.Dropout(0.2), nn.Linear(128, 64)]
    return nn.Sequential(*layers, nn.Dropout(0.1), nn.Linear(64, 16), nn.Linear(16, 1))


def test_the_score_is_the_head_of_the_unit_embedding_in_eval_mode() -> None:
    images = torch.randint(0, 256, (3, 3, 64, 64), generator=torch.Generator().manual_seed(0)) / 255
    reward = Aesthetic(**tiny_models.options("aesthetic"))
    values = score(reward, images, [""] * 3, [{}] * 3, list("abc")).values
    published = with_dropout()
    published.load_state_dict({k.removeprefix("layers."): v for k, v in tiny_models.head(768).items()})
    clip = reward._clip
    with torch.no_grad():
        levels = (images * 255).round().byte().permute(0, 2, 3, 1)
        seen = clip.network.get_image_features(pixel_values=clip.pixels.pictures(levels))
        seen = getattr(seen, "pooler_output", seen)
        expected = published.eval()(seen / seen.norm(dim=-1, keepdim=True)).squeeze(-1)
    torch.testing.assert_close(values, expected, rtol=0, atol=2e-6)
    reward._head.train()  # nothing is dropped in any mode
    assert torch.equal(score(reward, images, [""] * 3, [{}] * 3, list("abc")).values, values)


def test_the_head_is_one_affine_map() -> None:
    head = load_head(Path(tiny_models.head_file()))
    x, y = torch.randn(2, 4, 768, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(head(x) + head(y) - head(torch.zeros(4, 768)), head(x + y), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("width", [512, 1024])
def test_a_head_for_another_embedding_is_refused(tmp_path: Path, width: int) -> None:
    torch.save(tiny_models.head(width), tmp_path / "head.pth")
    with pytest.raises(WeightsError, match=r"1 of another shape .*768 inputs"):
        load_head(tmp_path / "head.pth")


def test_the_sister_head_with_activations_is_refused(tmp_path: Path) -> None:
    moved = {0: 0, 2: 3, 4: 6, 6: 9, 7: 11}  # a ReLU after each layer moves the numbers
    head = {f"layers.{moved[int(k.split('.')[1])]}.{k.split('.')[2]}": v for k, v in tiny_models.head(768).items()}
    torch.save(head, tmp_path / "head.pth")
    with pytest.raises(WeightsError, match=r"6 missing .*6 unexpected .*no activations"):
        load_head(tmp_path / "head.pth")


def test_a_clip_of_another_width_or_activation_is_refused() -> None:
    images = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    narrow = tiny_models.pair(tiny_models.clip_folder(projection=32, act="quick_gelu"))
    with pytest.raises(WeightsError, match="reads 768 numbers, the model gives 32"):
        Aesthetic(**narrow, head=tiny_models.head_file()).differentiable(images, [""])
    with pytest.raises(WeightsError, match="runs gelu, the weights were trained with quick_gelu"):
        Aesthetic(**tiny_models.pair(tiny_models.clip_folder()), head=tiny_models.head_file()).differentiable(
            images, [""]
        )


@pytest.mark.skipif(not PUBLISHED.is_file(), reason="set FLOWRL_IMG_AESTHETIC_HEAD to sac+logos+ava1-l14-linearMSE.pth")
def test_the_published_head_is_the_map_that_was_measured() -> None:
    head = load_head(PUBLISHED).double()
    basis = torch.eye(768, dtype=torch.float64)
    with torch.no_grad():
        [b] = head(torch.zeros(1, 768, dtype=torch.float64))
        w = head(basis) - b
        [flat] = head(torch.full((1, 768), 768**-0.5, dtype=torch.float64))
    assert b.item() == pytest.approx(5.23665, abs=1e-4) and w.norm().item() == pytest.approx(17.9956, abs=1e-3)
    assert w[:4].tolist() == pytest.approx([-0.69159, -0.55699, -0.32117, -0.63148], abs=1e-4)
    assert flat.item() == pytest.approx(4.883285, abs=1e-4)
