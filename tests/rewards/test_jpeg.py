"""JPEG size."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter

from flowrl_img.rewards.jpeg import Jpeg, encoded_kb
from flowrl_img.rewards.score import score

# kB of uniform noise, the same blurred by 4 px, and flat grey. Encoders differ by their version: 3 %.
SIZES = {64: (5.45, 1.20, 0.69), 256: (77.5, 9.36, 1.65), 512: (308.0, 35.6, 4.73)}


def three_pictures(side: int) -> list[np.ndarray]:
    noise = np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8)
    blurred = np.array(Image.fromarray(noise).filter(ImageFilter.GaussianBlur(4)))
    return [noise, blurred, np.full((side, side, 3), 128, np.uint8)]


@pytest.mark.parametrize("side", SIZES)
def test_sizes_are_those_of_the_reference(side: int) -> None:
    sizes = [encoded_kb(torch.from_numpy(picture), 95) for picture in three_pictures(side)]
    assert sizes == pytest.approx(SIZES[side], rel=0.03)


def test_the_two_directions_are_the_published_ones() -> None:
    images = torch.from_numpy(np.stack(three_pictures(64))).permute(0, 3, 1, 2) / 255
    rows = ([""] * 3, [{}] * 3, ["a", "b", "c"])
    small, large = (score(Jpeg(mode), images, *rows) for mode in ("compressibility", "incompressibility"))
    assert large.values.tolist() == pytest.approx(SIZES[64], rel=0.03)
    torch.testing.assert_close(small.values, -large.values / 500)
    assert large.details["kilobytes"] == pytest.approx(large.values.tolist())


def test_a_lower_quality_gives_a_smaller_file() -> None:
    noise = torch.from_numpy(three_pictures(64)[0])
    assert encoded_kb(noise, 20) < encoded_kb(noise, 95) / 2


@pytest.mark.parametrize("quality", [0, 96])
def test_a_quality_that_pillow_does_not_have_is_an_error(quality: int) -> None:
    with pytest.raises(ValueError, match=r"1\.\.95"):
        Jpeg(quality=quality)
