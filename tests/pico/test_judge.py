"""The dual encoders in miniature: wrong captions are wrong in one way, training resumes, the saved folder is stock."""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from flowrl_img.pico import architecture, judge
from flowrl_img.pico.judge import (
    CELL_CLASSES,
    JUDGES,
    build,
    cell_loss,
    contrastive_loss,
    pixels_of,
    preferences,
    save,
    scenes,
    side_loss,
    sides,
    train_judge,
)
from flowrl_img.pico.wrong_captions import KINDS, kinds_in, wrong_caption
from flowrl_img.world import TASKS, prompts_of
from flowrl_img.world.scenes import Scene, SceneObject
from flowrl_img.world.vocabulary import SHAPES

TINY = dataclasses.replace(JUDGES["reward"], steps=3, batch=4, wrong=1)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


CAPTIONS = [prompts_of("test", task)[3]["prompt"] for task in (*TASKS, "ocr")]


@pytest.mark.parametrize("caption", [*CAPTIONS, "a photo of an orange ring left of a red star"])
def test_a_wrong_caption_differs_in_one_attribute_of_the_kind_asked_for(caption):
    rng = np.random.default_rng(0)
    for kind in kinds_in(caption):
        for _ in range(20):
            wrong = wrong_caption(caption, rng, kind)
            assert wrong != caption
            assert kinds_in(wrong) == kinds_in(caption)
            ours, theirs = (text.replace(" an ", " a ").split() for text in (caption, wrong))
            assert len(ours) == len(theirs)
            assert sum(a != b for a, b in zip(ours, theirs, strict=True)) == 1
            assert " a orange" not in wrong and " an r" not in wrong


def test_every_kind_occurs_in_the_captions_of_the_world():
    assert {kind for caption in CAPTIONS for kind in kinds_in(caption)} == set(KINDS)


def test_a_wrong_shape_is_none_of_the_shapes_in_the_caption():
    rng = np.random.default_rng(0)
    wrongs = {wrong_caption("a photo of a circle and a star", rng, "shape") for _ in range(200)}
    assert not {"a photo of a star and a star", "a photo of a circle and a circle"} & wrongs
    assert len(wrongs) == 12


def test_an_attribute_that_is_not_stated_is_refused():
    with pytest.raises(ValueError, match="states no color; it states shape"):
        wrong_caption("a photo of a ring", np.random.default_rng(0), "color")


def test_scenes_are_pure_in_their_seed_and_of_the_splits_asked_for():
    first, second, other = (scenes(("train",), 0.4, seed) for seed in (5, 5, 6))
    a, b, c = ([next(source) for _ in range(8)] for source in (first, second, other))
    assert [caption for _, caption, _, _ in a] == [caption for _, caption, _, _ in b]
    assert all(torch.equal(x, y) for one, two in zip(a, b, strict=True) for x, y in zip(one[2:], two[2:], strict=True))
    assert [caption for _, caption, _, _ in a] != [caption for _, caption, _, _ in c]


def test_equal_captions_do_not_compete():
    rows = torch.nn.functional.normalize(torch.randn(3, 8, generator=torch.Generator().manual_seed(0)), dim=-1)
    picture, ring, star = rows[:1], rows[1:2], rows[2:]
    scale = torch.tensor(10.0)
    once = contrastive_loss(scale, picture, torch.cat([ring, star]), ["a ring", "a star"])
    twice = contrastive_loss(scale, picture.repeat(2, 1), torch.cat([ring, ring, star]), ["a ring", "a ring", "a star"])
    torch.testing.assert_close(once, twice)
    assert contrastive_loss(scale, picture, torch.cat([ring, star]), ["a ring", "a ring"]) < 1e-6


def test_cells_are_named_by_their_content():
    cells = next(scenes(("train",), 0.0, 3))[2][None]
    assert cells.shape == (1, 3, 64) and (cells > 0).any()
    right = torch.cat([torch.nn.functional.one_hot(cells[:, k], n) for k, n in enumerate(CELL_CLASSES)], -1).float()
    assert cell_loss(20 * right, cells) < 1e-4
    assert cell_loss(torch.zeros_like(right), cells) > 2
    nothing = torch.zeros(1, 3, 64, dtype=torch.int64)
    empty = cell_loss(torch.zeros_like(right), nothing)
    torch.testing.assert_close(empty, 0.1 * sum(torch.tensor(float(n)).log() for n in CELL_CLASSES))


def test_sides_are_said_of_two_different_shapes_that_are_apart():
    ring, star = (SceneObject(shape, "red", x, 30.0, 8.0) for shape, x in (("ring", 12.0), ("star", 50.0)))
    labels = sides(Scene((ring, star), *[(0.0, 0.0, 0.0)] * 3))
    x, y = labels.tolist()
    assert {SHAPES[k]: side for k, side in enumerate(x) if side >= 0} == {"ring": 0, "star": 1}
    assert set(y) == {-100}
    near = SceneObject("star", "red", 16.0, 30.0, 8.0)
    again = SceneObject("ring", "blue", 50.0, 30.0, 8.0)
    for objects in ((ring,), (ring, near), (ring, again), (ring, star, near)):
        assert (sides(Scene(objects, *[(0.0, 0.0, 0.0)] * 3)) == -100).all()
    logits = torch.zeros(1, 32)
    torch.testing.assert_close(side_loss(logits, labels[None]), torch.tensor(2.0).log())
    right = torch.nn.functional.one_hot(labels.clamp(min=0), 2).float().flatten()[None]
    assert side_loss(30 * right, labels[None]) < 1e-6
    assert side_loss(logits, torch.full((1, 2, 8), -100)) == 0


def test_a_stopped_judge_goes_on_to_the_same_weights(tmp_path, monkeypatch):
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    for folder in (straight, stopped):
        folder.mkdir()
    whole = train_judge(straight, TINY)
    clock = iter([0, 0, 0, 999])
    # The module's own clock: other threads of the process ask the real one.
    monkeypatch.setattr(judge, "time", SimpleNamespace(monotonic=lambda: next(clock, 999)))
    train_judge(stopped, TINY, minutes=1)
    assert torch.load(stopped / "judge.pt", weights_only=True)["step"] == 2
    resumed = train_judge(stopped, TINY)
    for (name, a), b in zip(whole.state_dict().items(), resumed.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    assert json.loads((stopped / "judge_log.jsonl").read_text().splitlines()[-1])["step"] == 3


def test_the_saved_folder_is_read_by_the_clip_reward(tmp_path):
    from flowrl_img.rewards import registry
    from flowrl_img.rewards.protocol import RewardBatch

    torch.manual_seed(0)
    net = build(architecture.tokenizer()).eval()
    save(net, tmp_path / "judge")
    assert sum(f.stat().st_size for f in (tmp_path / "judge").rglob("*") if f.is_file()) < 5e6
    reward = registry.load("clipscore", model=str(tmp_path / "judge"), processor=str(tmp_path / "judge"))
    picture, caption, _, _ = next(scenes(("test",), 0.0, 3))
    scored = reward(RewardBatch(picture[None], [caption], [{}], ["0"])).values
    with torch.no_grad():
        seen, read = judge.embed(net, architecture.tokenizer(), pixels_of(picture[None]), [caption])
    torch.testing.assert_close(scored, (seen * read).sum(1), rtol=0, atol=2e-3)  # half precision on disk


def test_preferences_of_an_untrained_encoder_are_near_chance():
    torch.manual_seed(0)
    found = preferences(build(architecture.tokenizer()).eval(), ("test",), pictures=100)
    assert set(found) == {*KINDS, "mean"}
    assert 0.2 < found["mean"] < 0.8
