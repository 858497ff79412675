"""The two preprocessings against short references."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from flowrl_img.rewards.pixels import CLIP_MEAN, CLIP_STD, CropPixels, PadPixels, crop_pixels
from flowrl_img.rewards.pretrained import WeightsError

SIDES = [(64, 64), (300, 200), (97, 225), (224, 224)]


def picture(height: int, width: int) -> torch.Tensor:
    """uint8 [1, H, W, 3]: noise over a gradient."""
    rng = np.random.default_rng(0)
    slope = np.linspace(0, 200, width)[None, :, None] + np.zeros((height, 1, 3))
    return torch.from_numpy((slope + rng.integers(0, 56, (height, width, 3))).astype(np.uint8))[None]


def reference(image: torch.Tensor) -> torch.Tensor:
    """Short side 224, bicubic in Pillow; centre crop; / 255; mean and std."""
    height, width = image.shape[1:3]
    size = (int(224 * width / min(height, width)), int(224 * height / min(height, width)))
    small = np.asarray(Image.fromarray(image[0].numpy()).resize(size, Image.Resampling.BICUBIC))
    left, top = (size[0] - 224) // 2, (size[1] - 224) // 2
    crop = small[top : top + 224, left : left + 224].astype(np.float32) / 255
    return torch.from_numpy(((crop - np.float32(CLIP_MEAN)) / np.float32(CLIP_STD)).transpose(2, 0, 1))[None]


@pytest.mark.parametrize("sides", SIDES)
def test_the_clip_preprocessing_is_the_reference(sides: tuple[int, int]) -> None:
    assert torch.equal(CropPixels().pictures(picture(*sides)), reference(picture(*sides)))


@pytest.mark.parametrize("sides", SIDES)
def test_the_clip_preprocessing_is_that_of_transformers(sides: tuple[int, int]) -> None:
    module = pytest.importorskip("transformers.models.clip.image_processing_pil_clip", reason="transformers 5")
    theirs = module.CLIPImageProcessorPil()([picture(*sides)[0].numpy()], return_tensors="pt").pixel_values
    # It scales by 1/255 and divides by std in another order: rounding of numbers up to 2.7.
    torch.testing.assert_close(CropPixels().pictures(picture(*sides)), theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("sides", SIDES)
def test_the_differentiable_way_sees_the_same_up_to_8_bit_rounding(sides: tuple[int, int]) -> None:
    image = picture(*sides) // 2 + 50  # away from 0 and 255, where Pillow clips between its two passes
    floats = CropPixels().floats(image.permute(0, 3, 1, 2) / 255)
    difference = (floats - CropPixels().pictures(image)).abs()
    exact = sides == (224, 224)
    # Pillow rounds to 8 bits after each of two passes, about one level at most: 1 / 255 over the smallest std, 0.015.
    assert difference.max() < (1e-6 if exact else 0.023) and difference.mean() < (1e-6 if exact else 0.006)


def test_an_odd_margin_is_split_as_the_library_of_the_model_splits_it() -> None:
    image = picture(227, 224)
    down, even = CropPixels(224, 224), CropPixels(224, 224, rounded=True)
    rows = CropPixels(224, 1)._cropped, image.permute(0, 3, 1, 2).float()
    assert rows[0](rows[1]).shape[2:] == (1, 1)
    assert down._start(3) == 1 and even._start(3) == 2 and even._start(1) == 0
    assert torch.equal(down.pictures(image)[:, :, 1:], even.pictures(image)[:, :, :-1])


@pytest.mark.parametrize("antialias", [True, False])
@pytest.mark.parametrize("sides", [(64, 64), (300, 200), (97, 225), (150, 224)])
def test_the_hps_preprocessing_resizes_floats_then_pads_then_normalises(
    sides: tuple[int, int], antialias: bool
) -> None:
    vision = pytest.importorskip("torchvision.transforms.functional", reason="torchvision is the reference")
    image = picture(*sides)
    floats = vision.to_tensor(image[0].numpy())
    height, width = (round(side * 224 / max(sides)) for side in sides)
    small = vision.resize(floats, [height, width], vision.InterpolationMode.BICUBIC, antialias=antialias)
    down, right = 224 - height, 224 - width
    padded = vision.pad(small, [right // 2, down // 2, right - right // 2, down - down // 2], fill=0)
    expected = vision.normalize(padded, CLIP_MEAN, CLIP_STD)[None]
    torch.testing.assert_close(PadPixels(antialias=antialias).pictures(image), expected, rtol=0, atol=2e-6)


def test_the_hps_bars_are_black_and_pictures_keep_their_shape() -> None:
    seen = PadPixels().pictures(torch.full((1, 100, 200, 3), 255, dtype=torch.uint8))
    black, white = ((level - torch.tensor(CLIP_MEAN)) / torch.tensor(CLIP_STD) for level in (0, 1))
    torch.testing.assert_close(seen[0, :, 55, 100], black)
    torch.testing.assert_close(seen[0, :, 56, 100], white, rtol=0, atol=1e-5)
    assert seen.shape == (1, 3, 224, 224)


def test_antialiasing_matters_when_pictures_shrink() -> None:
    large = picture(1024, 1024)
    difference = (PadPixels(antialias=True).pictures(large) - PadPixels(antialias=False).pictures(large)).abs()
    assert difference.mean() > 0.05


def test_the_settings_come_from_either_config_file(tmp_path: Path) -> None:
    flat, nested = tmp_path / "preprocessor_config.json", tmp_path / "processor_config.json"
    old = {"size": 64, "crop_size": 64, "image_mean": [0.5] * 3, "image_std": [0.25] * 3, "resample": 3}
    new = {"image_processor": {"size": {"shortest_edge": 64}, "crop_size": {"height": 64, "width": 64}}}
    flat.write_text(json.dumps(old))
    nested.write_text(json.dumps(new))
    assert crop_pixels(flat) == CropPixels(64, 64, (0.5,) * 3, (0.25,) * 3)
    assert crop_pixels(nested) == CropPixels(64, 64)


@pytest.mark.parametrize("odd", [{"do_center_crop": False}, {"resample": 2}, {"size": {"height": 64, "width": 64}}])
def test_another_preprocessing_than_clips_is_refused(tmp_path: Path, odd: dict) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(odd))
    with pytest.raises(WeightsError, match="no CLIP preprocessing"):
        crop_pixels(tmp_path / "preprocessor_config.json")


def test_a_gradient_reaches_every_pixel() -> None:
    for pixels in (CropPixels(), PadPixels()):
        images = F.interpolate(picture(50, 50).permute(0, 3, 1, 2) / 255, size=(50, 50)).requires_grad_()
        pixels.floats(images).square().sum().backward()
        assert images.grad is not None and (images.grad != 0).all()
