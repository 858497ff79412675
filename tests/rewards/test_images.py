"""The one conversion from float pictures to 8-bit ones."""

from __future__ import annotations

import pytest
import torch

from flowrl_img.rewards.images import to_uint8


def gray(*levels: float) -> torch.Tensor:
    """[1, 3, 1, B]: a row of pixels of the given levels."""
    return torch.tensor(levels).expand(1, 3, 1, -1).clone()


def test_levels_are_rounded_and_channels_come_last() -> None:
    images = torch.zeros(2, 3, 4, 5)
    images[1, 0] = 1.0
    pixels, finite = to_uint8(images)
    assert pixels.shape == (2, 4, 5, 3) and pixels.dtype == torch.uint8
    assert finite.tolist() == [True, True]
    assert pixels[1, 0, 0].tolist() == [255, 0, 0]
    assert to_uint8(gray(0.0, 0.4 / 255, 0.6 / 255, 1.0))[0][0, 0, :, 0].tolist() == [0, 0, 1, 255]


def test_every_level_survives_the_round_trip() -> None:
    levels = torch.arange(256)
    assert to_uint8(gray(*(levels / 255).tolist()))[0][0, 0, :, 0].tolist() == levels.tolist()


def test_bfloat16_pictures_are_rounded_in_float32() -> None:
    images = torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(to_uint8(images)[0], to_uint8(images.float())[0])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_picture_that_is_not_finite_is_reported_and_the_others_kept(value: float) -> None:
    images = torch.full((3, 3, 2, 2), 0.5)
    images[1, 2, 0, 1] = value
    pixels, finite = to_uint8(images)
    assert finite.tolist() == [True, False, True]
    assert (pixels[[0, 2]] == 128).all()


@pytest.mark.parametrize("level", [-1.0, -0.01, 1.01, 255.0])
def test_another_range_is_an_error_that_names_the_range(level: float) -> None:
    with pytest.raises(ValueError, match=r"must lie in \[0, 1\]"):
        to_uint8(gray(0.5, level))


def test_rounding_errors_of_a_decoder_pass() -> None:
    assert to_uint8(gray(-5e-4, 1 + 5e-4))[0][0, 0, :, 0].tolist() == [0, 255]


@pytest.mark.parametrize("images", [torch.rand(3, 8, 8), torch.rand(1, 8, 8, 3), torch.zeros(1, 3, 8, 8).byte()])
def test_another_shape_or_type_is_an_error(images: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="must be float"):
        to_uint8(images)
