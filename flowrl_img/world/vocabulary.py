"""The words of the embedded world: shapes, colours, counts, relations, sign characters and their prompts.

Prompts and metadata follow GenEval's own JSONL schema, so everything that reads GenEval reads this world.
"""

from __future__ import annotations

__all__ = [
    "CHARACTERS",
    "COLORS",
    "NUMBERS",
    "PLURALS",
    "RELATIONS",
    "SHAPES",
    "TASKS",
    "color_attr_prompt",
    "colors_prompt",
    "counting_prompt",
    "position_prompt",
    "sign_prompt",
    "single_object_prompt",
    "two_object_prompt",
]

Metadata = dict

SHAPES: tuple[str, ...] = ("circle", "square", "triangle", "diamond", "star", "cross", "ring", "heart")
PLURALS: dict[str, str] = {shape: "crosses" if shape == "cross" else f"{shape}s" for shape in SHAPES}
COLORS: dict[str, tuple[int, int, int]] = {
    "red": (225, 40, 45),
    "orange": (245, 140, 25),
    "yellow": (245, 228, 60),
    "green": (45, 175, 65),
    "cyan": (70, 220, 225),
    "blue": (55, 90, 240),
    "purple": (170, 65, 215),
    "white": (242, 242, 242),
}
NUMBERS: dict[int, str] = {2: "two", 3: "three", 4: "four"}
RELATIONS: tuple[str, ...] = ("left of", "right of", "above", "below")
# Letters and digits that a reader confuses (0/O, 1/I, 5/S, 8/B ...) are left out of signs.
CHARACTERS = "ABCDEFHKLMNPRTUVXY2479"
TASKS: tuple[str, ...] = ("single_object", "two_object", "counting", "colors", "position", "color_attr")


def _a(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def _meta(tag: str, prompt: str, *include: dict, exclude: dict | None = None) -> Metadata:
    record: Metadata = {"tag": tag, "include": list(include)}
    if exclude is not None:
        record["exclude"] = [exclude]
    record["prompt"] = prompt
    return record


def single_object_prompt(shape: str) -> Metadata:
    """`a photo of a circle`"""
    return _meta("single_object", f"a photo of {_a(shape)}", {"class": shape, "count": 1})


def two_object_prompt(first: str, second: str) -> Metadata:
    """`a photo of a circle and a square`"""
    return _meta(
        "two_object",
        f"a photo of {_a(first)} and {_a(second)}",
        {"class": first, "count": 1},
        {"class": second, "count": 1},
    )


def counting_prompt(shape: str, count: int) -> Metadata:
    """`a photo of three circles`; one more than asked is excluded, as in GenEval."""
    return _meta(
        "counting",
        f"a photo of {NUMBERS[count]} {PLURALS[shape]}",
        {"class": shape, "count": count},
        exclude={"class": shape, "count": count + 1},
    )


def colors_prompt(shape: str, color: str) -> Metadata:
    """`a photo of a red circle`"""
    return _meta("colors", f"a photo of {_a(color)} {shape}", {"class": shape, "count": 1, "color": color})


def position_prompt(first: str, relation: str, second: str) -> Metadata:
    """`a photo of a circle left of a square`: the square is clause 0, the circle stands in relation to it."""
    return _meta(
        "position",
        f"a photo of {_a(first)} {relation} {_a(second)}",
        {"class": second, "count": 1},
        {"class": first, "count": 1, "position": [relation, 0]},
    )


def color_attr_prompt(first: tuple[str, str], second: tuple[str, str]) -> Metadata:
    """`a photo of a red circle and a blue square`; each argument is (color, shape)."""
    (color_1, shape_1), (color_2, shape_2) = first, second
    return _meta(
        "color_attr",
        f"a photo of {_a(color_1)} {shape_1} and {_a(color_2)} {shape_2}",
        {"class": shape_1, "count": 1, "color": color_1},
        {"class": shape_2, "count": 1, "color": color_2},
    )


def sign_prompt(text: str) -> Metadata:
    """`a sign that says "AB4"`"""
    return {"tag": "ocr", "prompt": f'a sign that says "{text}"', "ocr_target": text}
