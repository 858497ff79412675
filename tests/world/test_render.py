import numpy as np
import pytest

from flowrl_img.world import (
    COLORS,
    SHAPES,
    SIZE,
    Scene,
    SceneObject,
    Sign,
    outline,
    prompts_of,
    render,
    scene_for,
    shape_mask,
)

DARK = ((20.0, 30.0, 40.0), (0.0, 0.0, 0.0), (0.0, 0.0, 0.0))


def pixels(*objects: SceneObject, sign: Sign | None = None) -> np.ndarray:
    return np.asarray(render(Scene(objects, *DARK, sign=sign)))


@pytest.mark.parametrize("task", ["counting", "color_attr", "ocr"])
def test_rendering_is_deterministic_and_64_by_64_rgb(task):
    scene = scene_for(prompts_of("test", task)[0], np.random.default_rng(3))
    first, second = render(scene), render(scene)
    assert (first.size, first.mode) == ((SIZE, SIZE), "RGB")
    assert first.tobytes() == second.tobytes()


def test_an_empty_scene_is_its_background():
    assert (pixels() == [20, 30, 40]).all()


def test_the_background_follows_its_slopes():
    picture = np.asarray(render(Scene((), (10.0, 10.0, 10.0), (0.5, 0.0, 0.0), (0.0, 0.25, 0.0))))
    assert picture[0, 63, 0] == round(10 + 0.5 * 63) and picture[63, 0, 1] == round(10 + 0.25 * 63)
    assert (picture[..., 2] == 10).all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("color", ["red", "white"])
def test_a_shape_has_its_colour_and_touches_nothing_outside_its_disc(shape, color):
    item = SceneObject(shape, color, 30.3, 34.7, 11.0)
    picture = pixels(item)
    changed = (picture != [20, 30, 40]).any(axis=-1)
    y, x = np.nonzero(changed)
    distance = np.hypot(x + 0.5 - item.x, y + 0.5 - item.y)
    assert distance.max() <= item.reach + 1.5  # antialiasing reaches one pixel further
    assert (picture == COLORS[color]).all(axis=-1).sum() > 0.5 * changed.sum()


@pytest.mark.parametrize("shape", SHAPES)
def test_the_area_of_a_mask_is_that_of_its_outline(shape):
    corners = np.array(outline(shape))
    x, y = corners.T
    area = 0.5 * abs(np.dot(x, np.roll(y, 1)) - np.dot(y, np.roll(x, 1))) * 12**2
    if shape == "ring":
        area *= 1 - 0.52**2
    covered = np.asarray(shape_mask(shape, (40, 40), 20.0, 20.0, 12.0)).sum() / 255
    # Pillow fills the border pixels of a polygon: half a fine pixel along the edge.
    assert covered == pytest.approx(area, rel=0.06)


def test_shapes_differ_from_each_other():
    masks = {shape: np.asarray(shape_mask(shape, (40, 40), 20.0, 20.0, 14.0)) > 127 for shape in SHAPES}
    for a in SHAPES:
        for b in SHAPES:
            if a < b:
                union = (masks[a] | masks[b]).sum()
                assert (masks[a] ^ masks[b]).sum() > 0.12 * union, (a, b)


def test_an_unknown_shape_is_refused():
    with pytest.raises(ValueError, match="unknown shape 'blob'"):
        outline("blob")


@pytest.mark.parametrize("text", ["AB", "X4K", "HR79"])
def test_a_sign_lies_inside_the_picture_with_dark_ink_on_a_light_panel(text):
    panel, ink = (238, 236, 226), (20, 20, 26)
    picture = pixels(sign=Sign(text, 32.0, 30.0, panel, ink))
    assert (picture[[0, -1]] == [20, 30, 40]).all() and (picture[:, [0, -1]] == [20, 30, 40]).all()
    assert (picture == panel).all(axis=-1).sum() > 100
    assert (picture == ink).all(axis=-1).sum() > 15 * len(text)


def test_another_text_is_another_picture():
    signs = [pixels(sign=Sign(text, 32.0, 30.0, (238, 236, 226), (20, 20, 26))) for text in ("AB", "BA", "AC")]
    assert len({picture.tobytes() for picture in signs}) == 3
