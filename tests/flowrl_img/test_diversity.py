import numpy as np
import pytest
import torch

from flowrl_img.diversity import diversity, pack, thumbnails, unpack


def test_a_thumbnail_is_the_mean_of_its_blocks():
    image = torch.arange(64, dtype=torch.float32).view(8, 8) / 63
    thumb = thumbnails(image.repeat_interleave(4, 0).repeat_interleave(4, 1).expand(1, 3, 32, 32))
    assert thumb.shape == (1, 192) and thumb.dtype == np.uint8
    np.testing.assert_array_equal(thumb[0].reshape(3, 64)[1], (np.arange(64) / 63 * 255).round())


def test_the_diversity_of_a_prompt_is_the_mean_distance_of_its_pairs():
    grey = np.array([0, 51, 255], np.uint8)[:, None].repeat(192, 1)
    found = diversity(np.concatenate([grey, grey[:1], grey[:1]]), ["a", "a", "a", "b", "c"])
    assert found == {"a": pytest.approx((0.2 + 1.0 + 0.8) / 3)}  # b and c have one picture each


def test_equal_pictures_have_no_diversity():
    thumbs = np.full((3, 192), 77, np.uint8)
    assert diversity(thumbs, [0, 0, 0]) == {0: 0.0}


def test_thumbnails_travel_as_text():
    thumb = thumbnails(torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0)))[0]
    np.testing.assert_array_equal(unpack(pack(thumb)), thumb)
    with pytest.raises(ValueError, match="192 bytes, not 1"):
        unpack("AA==")
