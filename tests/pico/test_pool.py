import numpy as np

from flowrl_img.pico.pool import CELLS, RECORDS, cell_labels, draw, make_pool
from flowrl_img.world import COLORS, SHAPES
from flowrl_img.world.splits import pair_split, text_split

SEEDS = range(400)


def test_a_pool_is_a_prefix_of_a_longer_one():
    short, long = make_pool(7, 3), make_pool(7, 5)
    assert np.array_equal(short.images, long.images[:3])
    assert short.captions == long.captions[:3]


def test_no_held_out_pair_or_text_is_ever_drawn():
    for seed in SEEDS:
        scene, _ = draw(seed)
        shapes = sorted({o.shape for o in scene.objects})
        if len(shapes) == 2:
            assert pair_split(*shapes) == "train"
        if scene.sign is not None:
            assert text_split(scene.sign.text) == "train"


def test_a_caption_names_what_the_scene_holds():
    for seed in SEEDS:
        scene, caption = draw(seed)
        for item in scene.objects:
            assert item.shape in caption
        if scene.sign is not None:
            assert f'"{scene.sign.text}"' in caption


def test_every_task_occurs():
    captions = [draw(seed)[1] for seed in SEEDS]
    assert sum("sign" in c for c in captions) > 30
    assert sum(" left of " in c or " right of " in c for c in captions) > 10
    assert set(RECORDS) == {"single_object", "two_object", "counting", "colors", "position", "color_attr"}


def test_cell_labels_stand_where_the_objects_are():
    seen = 0
    for seed in SEEDS:
        scene, _ = draw(seed)
        labels = cell_labels(scene)
        assert labels.shape == (3, CELLS, CELLS)
        for item in scene.objects:
            at = (int(item.y // 8), int(item.x // 8))
            assert labels[0][at] == 1 + SHAPES.index(item.shape)
            assert labels[1][at] == 1 + list(COLORS).index(item.color)
            seen += 1
        assert (labels[2] > 0).any() == (scene.sign is not None)
    assert seen > 300
