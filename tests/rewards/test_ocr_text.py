"""Targets, normalisation, reading order and the two ways to score a text."""

from __future__ import annotations

import pytest

from flowrl_img.rewards.ocr_text import extract_targets, full, join_lines, normalise, substring, targets_of


@pytest.mark.parametrize(
    ("prompt", "targets"),
    [
        ('a sign that says "AB4"', ["AB4"]),
        ("a sign that says “Hello World”", ["Hello World"]),
        ("a poster 「開店」 on a wall", ["開店"]),
        ('"one" above "two"', ["one", "two"]),
        ('a 5" pipe with "TEXT"', ["TEXT"]),
        ('a 5" pipe', []),
        ('a sign that says ""', []),
        ('says "" and "X"', ["X"]),
        ('says "  "', []),
        ("no quotes at all", []),
        ("it's Bob's shop", []),
        ('a sign that says "Bob\'s"', ["Bob's"]),
        ('an open "quote', []),
    ],
)
def test_targets_are_the_quoted_texts(prompt: str, targets: list[str]) -> None:
    assert extract_targets(prompt) == targets


def test_metadata_names_the_target_before_the_prompt() -> None:
    assert targets_of('says "A"', {"ocr_target": "B"}) == ["B"]
    assert targets_of("says nothing", {"ocr_target": ["B", "C"]}) == ["B", "C"]


@pytest.mark.parametrize("metadata", [{}, {"ocr_target": ""}, {"ocr_target": []}, {"ocr_target": ["A", " "]}])
def test_a_prompt_without_a_text_is_an_error_that_says_what_to_add(metadata: dict) -> None:
    with pytest.raises(ValueError, match="'ocr_target'"):
        targets_of("a sign", metadata)


@pytest.mark.parametrize("named", [2024, ["A", 5], {"a": 1}], ids=str)
def test_a_target_that_is_no_text_is_an_error_and_no_crash(named: object) -> None:
    with pytest.raises(ValueError, match="'ocr_target' must be a text or a list of texts"):
        targets_of("a sign", {"ocr_target": named})


def test_more_texts_than_can_be_scored_are_an_error() -> None:
    with pytest.raises(ValueError, match="at most 5"):
        targets_of(" ".join(f'"{k}"' for k in "ABCDEF"), {})


@pytest.mark.parametrize(
    ("text", "same"), [("Hello\u00a0 World\n", "helloworld"), ("ＡＢ４", "ab4"), ("STRASSE", "straße"), ("“x”", '"x"')]
)
def test_texts_that_look_alike_are_alike(text: str, same: str) -> None:
    assert normalise(text) == normalise(same)


def test_rows_are_read_from_the_top_and_each_from_the_left() -> None:
    def box(x: float, y: float, height: float = 10.0) -> list[list[float]]:
        return [[x, y], [x + 20, y], [x + 20, y + height], [x, y + height]]

    lines = [(box(50, 31), "D"), (box(0, 30), "C"), (box(40, 0), "B"), (box(2, 4), "A")]
    assert join_lines(lines) == "ABCD"
    assert join_lines([]) == ""


@pytest.mark.parametrize(
    ("read", "targets", "value"),
    [
        ("ab4", ["ab4"], 1.0),
        ("", ["ab4"], 0.0),
        ("ab", ["ab4"], 2 / 3),
        ("ab4x", ["ab4"], 2 / 3),
        ("xyzxyzxyz", ["ab4"], 0.0),
        ("cdab", ["ab", "cd"], 1.0),
        ("ab", ["ab", "cd"], 0.5),
    ],
)
def test_full_scores_one_minus_distance_over_length(read: str, targets: list[str], value: float) -> None:
    assert full(read, targets) == pytest.approx(value)


@pytest.mark.parametrize(
    ("read", "targets", "value"),
    [
        ("xxab4xx", ["ab4"], 1.0),
        ("abcdefg", ["a", "g"], 1.0),
        ("ab", ["ab", "cd"], 0.5),
        ("ax4", ["ab4"], 2 / 3),
        ("", ["ab4"], 0.0),
    ],
)
def test_substring_does_not_count_extra_text(read: str, targets: list[str], value: float) -> None:
    assert substring(read, targets) == pytest.approx(value)


def test_a_picture_full_of_letters_earns_nothing_by_default() -> None:
    alphabet = "abcdefghijklmnopqrstuvwxyz"
    assert substring(alphabet, ["k"]) == 1.0
    assert full(alphabet, ["k"]) == 0.0
