import numpy as np
import pytest
import torch

from flowrl_img.plot import Point, plot, ticks
from flowrl_img.sheets import Group, contact_sheet


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 3, [0, 1, 2, 3]), (0.41, 0.78, [0.5, 0.6, 0.7]), (-1.1, 1.1, [-1, -0.5, 0, 0.5, 1]), (2, 2, [2])],
)
def test_ticks_are_round_and_inside(low, high, expected):
    assert ticks(low, high) == pytest.approx(expected)


def blue_rows(image) -> list[int]:
    """Rows of the picture that hold the colour of the series."""
    pixels = np.asarray(image).astype(int)
    return sorted({int(y) for y in np.argwhere(np.abs(pixels - (0x1F, 0x6F, 0xB4)).sum(-1) == 0)[:, 0]})


def test_a_larger_value_stands_higher_and_an_interval_is_drawn():
    flat = plot("w", {"reward": [Point(0, 1, 1, 1), Point(1, 1, 1, 1)]})
    rows = blue_rows(plot("w", {"reward": [Point(0, 1, 0, 2), Point(1, 1, 1, 1)]}))
    assert max(rows) - min(rows) > 5 * (max(blue_rows(flat)) - min(blue_rows(flat)))
    rising = np.asarray(plot("w", {"reward": [Point(0, 0, 0, 0), Point(1, 1, 1, 1)]})).astype(int)
    series = np.argwhere(np.abs(rising - (0x1F, 0x6F, 0xB4)).sum(-1) == 0)
    left, right = series[series[:, 1].argmin()], series[series[:, 1].argmax()]
    assert right[0] < left[0]


def test_every_series_has_a_panel_of_its_own():
    one = plot("w", {"a": [Point(0, 1, 1, 1)]})
    two = plot("w", {"a": [Point(0, 1, 1, 1)], "b": [Point(0, 2, 1, 3), Point(2, 2, 1, 3)]})
    assert two.size == (2 * one.width, one.height)


def test_a_sheet_holds_every_picture_beside_its_group():
    colours = torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 0, 1]])
    groups = [Group([c.view(3, 1, 1).expand(3, 8, 8) for c in colours], ("a prompt",)) for _ in range(3)]
    sheet = np.asarray(contact_sheet("title", groups, ["x", "y", "z"], cell=40))
    counts = [int((np.abs(sheet.astype(int) - (255 * c).int().numpy()).sum(-1) == 0).sum()) for c in colours]
    assert counts == [3 * 40 * 40] * 3
    assert sheet.shape[1] < 2 * 3 * 42 + 40  # two groups of three in a row
