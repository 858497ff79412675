import math
from collections import Counter
from itertools import combinations

import numpy as np
import pytest

from flowrl_img.world import COLORS, SHAPES, SIZE, SPLITS, TASKS, SceneObject, prompts_of, relation_strength, scene_for
from flowrl_img.world.scenes import GAP

RNG = np.random.default_rng


def sampled(task: str, count: int = 24) -> list[dict]:
    """A fixed sample of a task's prompts over all splits."""
    records = [record for split in SPLITS for record in prompts_of(split, task)]
    return [records[k] for k in RNG(0).choice(len(records), size=count)]


@pytest.mark.parametrize("task", TASKS)
def test_a_scene_holds_exactly_the_objects_asked_for(task):
    for seed, record in enumerate(sampled(task)):
        scene = scene_for(record, RNG(seed))
        asked = Counter({clause["class"]: clause["count"] for clause in record["include"]})
        assert Counter(item.shape for item in scene.objects) == asked
        assert scene.sign is None
        for clause in record["include"]:
            if "color" in clause:
                assert {item.color for item in scene.objects if item.shape == clause["class"]} == {clause["color"]}


def test_a_position_holds_with_room_to_spare():
    for seed, record in enumerate(sampled("position", 48)):
        by_shape = {item.shape: item for item in scene_for(record, RNG(seed)).objects}
        reference, subject = record["include"]
        relation, _ = subject["position"]
        a, b = by_shape[subject["class"]], by_shape[reference["class"]]
        assert relation_strength(a, b, relation) > 0.6  # GenEval asks for 0.5
        lead = {"left of": b.x - a.x, "right of": a.x - b.x, "above": b.y - a.y, "below": a.y - b.y}[relation]
        assert lead > 0.6 * math.dist((a.x, a.y), (b.x, b.y))


@pytest.mark.parametrize("task", TASKS)
def test_objects_stay_in_the_frame_and_apart(task):
    for seed, record in enumerate(sampled(task)):
        objects = scene_for(record, RNG(seed)).objects
        for item in objects:
            assert item.r <= item.x <= SIZE - item.r and item.r <= item.y <= SIZE - item.r
            assert 6.5 <= item.r <= 15
        for a, b in combinations(objects, 2):
            assert math.dist((a.x, a.y), (b.x, b.y)) >= a.reach + b.reach + GAP


@pytest.mark.parametrize("task", [*TASKS, "ocr"])
def test_a_scene_is_a_pure_function_of_metadata_and_seed(task):
    record = sampled(task, 1)[0]
    assert scene_for(record, RNG(7)) == scene_for(record, RNG(7))
    assert scene_for(record, RNG(7)) != scene_for(record, RNG(8))


def test_a_sign_holds_the_text_asked_for_and_fits():
    for seed, record in enumerate(sampled("ocr")):
        scene = scene_for(record, RNG(seed))
        assert scene.sign is not None and scene.objects == ()
        assert scene.sign.text == record["ocr_target"]


def test_backgrounds_are_dark_everywhere_and_vary():
    corners = []
    for seed in range(40):
        scene = scene_for(prompts_of("train", "single_object")[0], RNG(seed))
        corner, dx, dy = map(np.array, (scene.corner, scene.slope_x, scene.slope_y))
        for x in (0, SIZE - 1):
            for y in (0, SIZE - 1):
                channels = corner + x * dx + y * dy
                assert (channels >= 0).all() and (channels <= 70).all()
        corners.append(scene.corner)
    assert np.std(corners, axis=0).min() > 5


def test_positions_and_sizes_vary_between_seeds():
    items = [scene_for(prompts_of("train", "single_object")[0], RNG(seed)).objects[0] for seed in range(60)]
    assert np.std([item.x for item in items]) > 6 and np.std([item.y for item in items]) > 6
    assert np.std([item.r for item in items]) > 1


def test_free_colours_use_the_whole_palette():
    record = prompts_of("train", "single_object")[0]
    assert {scene_for(record, RNG(seed)).objects[0].color for seed in range(120)} == set(COLORS)


@pytest.mark.parametrize("count", [0, 5])
def test_a_scene_of_no_or_too_many_objects_is_refused(count):
    with pytest.raises(ValueError, match=f"1 to 4 objects, not {count}: 'a crowd'"):
        scene_for({"prompt": "a crowd", "include": [{"class": "ring", "count": count}]}, RNG(0))


def test_a_prompt_that_cannot_be_true_is_refused():
    left, right = (["left of", 0], ["right of", 0])
    clauses = [{"class": "star", "count": 1}, {"class": "ring", "count": 1, "position": left}]
    clauses.append({"class": "ring", "count": 1, "position": right})
    with pytest.raises(ValueError, match="no room for a true scene"):
        scene_for({"prompt": "both sides", "include": clauses}, RNG(0))


@pytest.mark.parametrize(
    ("dx", "dy", "relation", "expected"),
    [
        (40, 0, "right of", 0.9),
        (40, 0, "left of", -0.9),
        (0, -40, "above", 0.9),
        (0, 3, "below", 0.0),
        (30, 30, "right of", (30 - 4) / math.hypot(30, 30)),
    ],
)
def test_relation_strength_by_hand(dx, dy, relation, expected):
    """Radii 10: the slack of GenEval is 0.1 x (20 + 20) = 4 pixels."""
    a, b = SceneObject("star", "red", 5.0 + dx, 50.0 + dy, 10.0), SceneObject("ring", "red", 5.0, 50.0, 10.0)
    assert relation_strength(a, b, relation) == pytest.approx(expected)


def test_shapes_and_colours_are_at_least_eight():
    assert len(SHAPES) >= 8 and len(COLORS) >= 8
