"""Which prompts belong to training, tuning and test, and the prompt files made from that.

What is held out is a *combination*, decided by arithmetic and not by a draw: two objects, position and colour
attribution go by the unordered pair of shapes, so a pair of the test split never stands together in any training or
pre-training picture; colours go by the (shape, colour) of the prompt, which may still meet in pictures of other tasks;
sign texts go by a hash of the text.
Single objects and counts have too few combinations (8 and 24): all splits share their prompts and differ by seeds.
Pre-training draws from the combinations of the training split alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path

import numpy as np

from flowrl_img.world import vocabulary as words
from flowrl_img.world.vocabulary import CHARACTERS, COLORS, NUMBERS, RELATIONS, SHAPES, TASKS

__all__ = [
    "SPLITS",
    "load_split",
    "pair_split",
    "color_split",
    "random_text",
    "text_split",
    "prompts_of",
    "write_splits",
]

SPLITS: tuple[str, ...] = ("train", "tune", "test")
ATTRIBUTION_PROMPTS = {"train": 288, "tune": 48, "test": 48}
SIGN_PROMPTS = {"train": 512, "tune": 64, "test": 128}


def pair_split(first: str, second: str) -> str:
    """Split of an unordered pair of shapes: 17 train, 4 tune, 7 test, each shape in every split.

    The 28 pairs of 8 shapes fall into 7 perfect matchings (round-robin); 0 and three pairs of 1 are test, 2 is tuning.
    """
    i, j = sorted((SHAPES.index(first), SHAPES.index(second)))
    if i == j:
        raise ValueError(f"a pair needs two different shapes, not {first!r} twice")
    matching = (2 * i) % 7 if j == 7 else (i + j) % 7
    if matching == 0 or (matching == 1 and i % 2 == 0):
        return "test"
    return "tune" if matching == 2 else "train"


def color_split(shape: str, color: str) -> str:
    """Split of a (shape, colour): 8 tune, 8 test, 48 train; a Latin square, so all shapes and colours occur in each."""
    diagonal = (SHAPES.index(shape) + list(COLORS).index(color)) % 8
    return {0: "test", 3: "tune"}.get(diagonal, "train")


def text_split(text: str) -> str:
    """Split of a sign text by hash: 10 % test, 10 % tune, the rest train."""
    bucket = hashlib.blake2b(text.encode(), digest_size=2).digest()[0] % 10
    return {0: "test", 1: "tune"}.get(bucket, "train")


def random_text(split: str, rng: np.random.Generator) -> str:
    """A text of 2 to 4 characters that belongs to `split`."""
    while True:
        length = int(rng.integers(2, 5))
        text = "".join(CHARACTERS[k] for k in rng.integers(len(CHARACTERS), size=length))
        if text_split(text) == split:
            return text


def prompts_of(split: str, task: str) -> list[dict]:
    """All metadata records of one GenEval-like task in `split`, or its sign prompts for task "ocr"."""
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}: choose from {', '.join(SPLITS)}")
    pairs = [(a, b) for a, b in permutations(SHAPES, 2) if pair_split(a, b) == split]
    match task:
        case "single_object":
            return [words.single_object_prompt(s) for s in SHAPES]
        case "counting":
            return [words.counting_prompt(s, n) for s in SHAPES for n in NUMBERS]
        case "two_object":
            return [words.two_object_prompt(a, b) for a, b in pairs]
        case "colors":
            return [words.colors_prompt(s, c) for s in SHAPES for c in COLORS if color_split(s, c) == split]
        case "position":
            return [words.position_prompt(a, relation, b) for a, b in pairs for relation in RELATIONS]
        case "color_attr":
            return [words.color_attr_prompt((c, a), (d, b)) for a, b in pairs for c, d in permutations(COLORS, 2)]
        case "ocr":
            return list(_signs(split))
    raise ValueError(f"unknown task {task!r}: choose from {', '.join((*TASKS, 'ocr'))}")


def _signs(split: str) -> Iterator[dict]:
    rng = np.random.default_rng(SPLITS.index(split))
    texts: dict[str, None] = {}
    while len(texts) < SIGN_PROMPTS[split]:
        texts[random_text(split, rng)] = None
    return map(words.sign_prompt, texts)


def _geneval(split: str) -> list[dict]:
    records: list[dict] = []
    for task in TASKS:
        found = prompts_of(split, task)
        if task == "color_attr":
            keep = np.random.default_rng(SPLITS.index(split)).permutation(len(found))[: ATTRIBUTION_PROMPTS[split]]
            found = [found[k] for k in sorted(keep)]
        records += found
    return records


def write_splits(folder: Path) -> None:
    """Write `{split}_geneval.jsonl` and `{split}_ocr.jsonl` for every split."""
    folder.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        for name, records in (("geneval", _geneval(split)), ("ocr", prompts_of(split, "ocr"))):
            lines = "".join(json.dumps(record) + "\n" for record in records)
            (folder / f"{split}_{name}.jsonl").write_text(lines)


def load_split(split: str, task: str = "geneval") -> list[dict]:
    """Records of the packaged prompt file of `split` ("train", "tune", "test") and `task` ("geneval", "ocr")."""
    records = {"geneval": _geneval, "ocr": lambda s: prompts_of(s, "ocr")}
    if split not in SPLITS or task not in records:
        raise ValueError(f"no prompts for split {split!r}, task {task!r}: splits are {SPLITS}, tasks geneval and ocr")
    return records[task](split)
