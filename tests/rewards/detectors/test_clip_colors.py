"""The colour classifier: what it shows to CLIP, and how it decides."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tiny_models
import torch

from flowrl_img.rewards.detectors.clip_colors import COLORS, TEMPLATES, ClipColors, cut_out
from flowrl_img.rewards.geneval.detection import Detection
from flowrl_img.rewards.pretrained import WeightsError


def classifier(**options: Any) -> ClipColors:
    return ClipColors(**tiny_models.pair(tiny_models.clip_folder(act="quick_gelu")), device="cpu", **options)


def picture() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8)


def test_the_object_stands_on_grey_cropped_to_its_box() -> None:
    mask = np.zeros((40, 60), bool)
    mask[10:20, 5:15] = True
    crop = np.asarray(cut_out(picture(), Detection("cat", 0.9, (4.4, 9.6, 16.5, 22.4), mask)))
    assert crop.shape == (12, 12, 3)  # 10 to 22 and 4 to 16: half to even
    assert np.array_equal(crop[:10, 1:11], picture()[10:20, 5:15])
    assert (crop[10:] == 0x99).all() and (crop[:, 0] == 0x99).all() and (crop[:, 11] == 0x99).all()


def test_without_a_mask_the_box_is_shown_and_it_is_never_empty() -> None:
    box = Detection("cat", 0.9, (5.0, 6.0, 15.0, 26.0))
    assert np.array_equal(np.asarray(cut_out(picture(), box)), picture()[6:26, 5:15])
    assert np.asarray(cut_out(picture(), Detection("cat", 0.9, (5.2, 6.2, 5.4, 6.4)))).shape == (1, 1, 3)


def test_a_colour_is_the_nearest_mean_of_three_templates() -> None:
    made = classifier()
    boxes = [Detection("cat", 0.9, box) for box in ((0, 0, 30, 30), (20, 5, 60, 40), (3, 3, 9, 9))]
    found = made.classify(picture(), boxes, "cat")
    clip = made._clip
    with torch.no_grad():
        means = []
        for color in COLORS:
            rows, _ = clip.embed_prompts([form.format(color=color, label="cat") for form in TEMPLATES])
            mean = rows.mean(0)
            means.append(mean / mean.norm())
        for box, color in zip(boxes, found, strict=True):
            crop = torch.from_numpy(np.array(cut_out(picture(), box)))[None]
            cosines = torch.stack(means) @ clip.embed_pixels(clip.pixels.pictures(crop))[0]
            assert color == COLORS[int((100 * cosines).argmax())]
    assert made.classify(picture(), [], "dog") == []
    assert list(made._texts) == ["cat"]  # encoded once, and only for what was there


def test_an_embedding_that_is_not_finite_is_an_error_and_not_the_first_colour() -> None:
    made = classifier()
    with torch.no_grad():
        made._clip.network.visual_projection.weight.fill_(float("nan"))
    with pytest.raises(WeightsError, match=r"clip_colors\.model = .* not finite"):
        made.classify(picture(), [Detection("cat", 0.9, (0, 0, 9, 9))], "cat")


def test_weights_without_quick_gelu_are_refused() -> None:
    gelu = ClipColors(**tiny_models.pair(tiny_models.clip_folder()))
    with pytest.raises(WeightsError, match="runs gelu, the weights were trained with quick_gelu"):
        gelu.classify(picture(), [Detection("cat", 0.9, (0, 0, 9, 9))], "cat")
