"""The detector of photographs, on a small random model of the real class."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from flowrl_img.rewards import known_answers, registry
from flowrl_img.rewards.detectors.mask2former import COCO, LEAST, Mask2Former, instances, prepared
from flowrl_img.rewards.pretrained import WeightsError

ROOT = Path(__file__).parents[3]


def detector(**options: Any) -> Mask2Former:
    return Mask2Former(
        **{"model": tiny_models.mask2former_folder(), "short": 64, "long": 128, "device": "cpu", **options}
    )


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def test_the_classes_are_coco_by_index_with_the_names_of_geneval() -> None:
    assert len(COCO) == len(set(COCO)) == 80
    indices = {"person": 0, "cat": 15, "tv": 62, "computer mouse": 64, "tv remote": 65, "computer keyboard": 66}
    assert {name: COCO.index(name) for name in indices} == indices and COCO[79] == "toothbrush"


def test_scores_labels_and_masks_are_those_of_transformers_where_it_does_not_crop() -> None:
    """Its post-processing works at 384 x 384 and forgets padding, so the two agree on pictures of just that size."""
    from transformers import Mask2FormerForUniversalSegmentation, Mask2FormerImageProcessorPil

    model = Mask2FormerForUniversalSegmentation.from_pretrained(tiny_models.mask2former_folder()).eval()
    pixels = torch.randn(1, 3, 384, 384, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        seen = model(pixel_values=pixels)
    [theirs] = Mask2FormerImageProcessorPil().post_process_instance_segmentation(
        seen, threshold=LEAST, target_sizes=[(384, 384)], return_binary_maps=True
    )
    ours = instances(seen.class_queries_logits[0], seen.masks_queries_logits[0], (384, 384), (384, 384), (384, 384))
    assert len(ours) == len(theirs["segments_info"]) > 3
    kept = sorted(zip(theirs["segments_info"], theirs["segmentation"], strict=True), key=lambda pair: -pair[0]["score"])
    for (info, mask), found in zip(kept, ours, strict=True):
        assert found.score == pytest.approx(info["score"], abs=2e-6) and found.label == COCO[info["label_id"]]
        assert found.mask is not None and np.array_equal(found.mask, mask.bool().numpy())


def test_padding_is_cropped_before_masks_are_brought_back() -> None:
    """A mask of the left half of a 64 x 96 input in a padded 64 x 128 frame is the left half of the picture."""
    classes = torch.full((1, 81), -20.0)
    classes[0, 15] = 20.0
    masks = torch.full((1, 16, 32), -10.0)
    masks[:, :, :12] = 10.0  # quarter resolution: 48 of 96 columns
    [found] = instances(classes, masks, (64, 128), (64, 96), (200, 300))
    assert found.label == "cat" and found.score == pytest.approx(1.0, abs=0.02)
    assert found.box[:2] == (0.0, 0.0) and found.box[3] == 200.0
    assert found.box[2] == pytest.approx(150, abs=3) and found.mask is not None and found.mask.shape == (200, 300)


def test_the_network_sees_the_short_side_at_its_length_padded_and_normalised() -> None:
    images = torch.from_numpy(noise(100, 150))[None].permute(0, 3, 1, 2)
    inputs, inner = prepared(images, short=64, long=128)
    assert inner == (64, 96) and inputs.shape == (1, 3, 64, 96)
    inputs, inner = prepared(images, short=70, long=84)  # the long side decides
    assert inner == (56, 84) and inputs.shape == (1, 3, 64, 96)
    assert (inputs[:, :, 56:] == 0).all() and (inputs[:, :, :, 84:] == 0).all()
    grey = torch.full((1, 3, 64, 64), 128, dtype=torch.uint8)
    expected = (128 / 255 - torch.tensor([0.485, 0.456, 0.406])) / torch.tensor([0.229, 0.224, 0.225])
    torch.testing.assert_close(prepared(grey, 64, 64)[0][0, :, 0, 0], expected)


def test_red_and_blue_are_not_exchanged() -> None:
    red = torch.zeros(1, 3, 64, 64, dtype=torch.uint8)
    red[:, 0] = 255
    pixel = prepared(red, 64, 64)[0][0, :, 0, 0]
    assert pixel[0] > 2 and pixel[2] < -1.7


def test_batches_equal_singles_and_pictures_may_differ_in_size() -> None:
    images = [noise(64, 64, 1), noise(64, 64, 2), noise(96, 64, 3), noise(64, 64, 4)]
    together = detector(batch=4).detect(images)
    for image, found in zip(images, together, strict=True):
        [alone] = detector(batch=1).detect([image])
        assert [d.label for d in alone] == [d.label for d in found]
        assert [d.score for d in alone] == pytest.approx([d.score for d in found], abs=1e-5)
        assert all(d.mask is not None and d.mask.shape == image.shape[:2] for d in found)


def test_a_checkpoint_whose_keys_are_renamed_is_refused_with_counts(tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_models.mask2former_folder(), tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    half = {(f"old.{k}" if n % 2 else k): v for n, (k, v) in enumerate(sorted(weights.items()))}
    save_file(half, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightsError, match=r"not of this model: keys \d+ missing .*\d+ unexpected"):
        detector(model=str(folder)).detect([noise(64, 64)])


def test_numbers_that_are_not_finite_are_an_error_and_not_an_empty_picture() -> None:
    made = detector()
    with torch.no_grad():
        next(made.network.parameters()).fill_(float("nan"))
    with pytest.raises(WeightsError, match=r"mask2former\.model = .* not finite"):
        made.detect([noise(64, 64)])


def test_a_model_of_other_classes_is_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_models.mask2former_folder(), tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights = {k: v[:6] if k.startswith("class_predictor") else v for k, v in weights.items()}
    weights["criterion.empty_weight"] = weights["criterion.empty_weight"][:6]
    save_file({k: v.contiguous() for k, v in weights.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    names = {str(k): f"c{k}" for k in range(5)}
    config |= {"id2label": names, "label2id": {name: int(k) for k, name in names.items()}, "num_labels": 5}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightsError, match="knows 5 classes; GenEval needs the 80"):
        detector(model=str(folder)).detect([noise(64, 64)])


def test_buffers_that_old_versions_saved_are_no_misfit(tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_models.mask2former_folder(), tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights["model.pixel_level_module.encoder.old.relative_position_index"] = torch.zeros(4, dtype=torch.long)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert detector(model=str(folder)).detect([noise(64, 64)])


def test_pictures_of_ones_own_are_known_answers(tmp_path: Path) -> None:
    Image.fromarray(noise(64, 64)).save(tmp_path / "two_cats.png")
    row = {"file": "two_cats.png", "tag": "counting", "include": [{"class": "cat", "count": 2}]}
    (tmp_path / "known.jsonl").write_text(json.dumps(row) + "\n")
    options = {"name": "mask2former", "model": tiny_models.mask2former_folder(), "short": 64, "device": "cpu"}
    reward = registry.load("geneval", detector={**options, "known": str(tmp_path / "known.jsonl")}, colors="scenes")
    with pytest.raises(known_answers.KnownAnswerError, match=r"a picture of .*'cat'.* scored 0 instead of 1"):
        known_answers.check(reward)
    known_answers.check(registry.load("geneval", detector=options, colors="scenes"))  # states none


def test_options_that_make_no_size_are_refused() -> None:
    with pytest.raises(ValueError, match="0 < short <= long"):
        Mask2Former(short=800, long=700)


END_TO_END = """
import sys
for name in ("torchvision", "mmdet", "mmcv", "open_clip", "timm"):
    sys.modules[name] = None
import numpy as np, tiny_models, torch
from flowrl_img.rewards import registry
from flowrl_img.rewards.score import score
from flowrl_img.world import COLORS, SHAPES, load_split, render, scene_for

torch.set_num_threads(1)
THINGS = dict(zip(SHAPES, ("sports ball", "book", "pizza", "kite", "teddy bear", "airplane", "donut", "apple")))
PAINTS = dict(zip(COLORS, ("red", "orange", "yellow", "green", "blue", "purple", "pink", "white")))

def posed(row):
    def clause(one):
        return {**one, "class": THINGS[one["class"]]} | ({"color": PAINTS[one["color"]]} if "color" in one else {})
    return {**row, **{key: [clause(one) for one in row[key]] for key in ("include", "exclude") if key in row}}

rows = (load_split("test") + load_split("train"))[:300]
rng = np.random.default_rng(0)
drawn = np.stack([np.asarray(render(scene_for(row, rng))) for row in rows])
images = torch.from_numpy(drawn).permute(0, 3, 1, 2) / 255
small = {"model": tiny_models.mask2former_folder(), "short": 64, "long": 64, "device": "cpu", "batch": 16}
clip = tiny_models.pair(tiny_models.clip_folder(act="quick_gelu"))
reward = registry.load("geneval", detector={"name": "mask2former", **small}, colors={"name": "clip_colors", **clip})
asked = [posed(row) for row in rows]
reward.validate([row["prompt"] for row in rows], asked)
out = score(reward, images, [row["prompt"] for row in rows], asked, [str(k) for k in range(300)])
assert out.valid.all() and out.values.min() >= 0 and out.values.max() <= 1, out.values
found = reward._detector.detect(list(drawn[:8]))
assert sum(map(len, found)) > 8 and all(d.mask.any() for each in found for d in each)
assert "detector.model.sha256" in reward.fingerprint and "colors.model.sha256" in reward.fingerprint
assert not [name for name in sys.modules if name.split(".")[0] == "torchvision" and sys.modules[name] is not None]
print(len(out.values), "scored")
"""


def test_300_scenes_pass_through_the_whole_path_without_torchvision() -> None:
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'support'}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", END_TO_END], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "300 scored"
