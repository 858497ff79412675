"""The text side of the OCR reward, pure: which texts a prompt asks for, how texts are made comparable, how they score.

Source: arXiv 2505.05470 (Flow-GRPO), reward 1 - Levenshtein / length. Differences, each against a defect of its code:
inch marks and curly quotes are understood, every quoted text counts, extra text in the picture costs (mode "full").
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from itertools import permutations

from rapidfuzz.distance import Levenshtein

from flowrl_img.rewards.protocol import Metadata

__all__ = ["MAX_TARGETS", "MODES", "extract_targets", "full", "join_lines", "normalise", "substring", "targets_of"]

MAX_TARGETS = 5  # mode "full" tries every order of the texts

# A double quote right after a digit is an inch mark unless it closes a text: 5" pipe with "TEXT".
_QUOTED = re.compile(r'(?<!\d)"([^"]*)"|[“”„]([^“”„]*)[“”]|「([^」]*)」')
_STRAIGHT = str.maketrans("“”„‟‘’‚‛′″", "\"\"\"\"'''''\"")


def extract_targets(prompt: str) -> list[str]:
    """The non-empty texts in "...", curly or corner quotes, in order; single quotes are apostrophes, so not those."""
    found = (next(group for group in match.groups() if group is not None) for match in _QUOTED.finditer(prompt))
    return [text for text in found if normalise(text)]


def targets_of(prompt: str, metadata: Metadata) -> list[str]:
    """Texts that the picture must show: metadata `ocr_target` (a text or a list), else the quoted parts of the prompt.

    ValueError when there is none, more than MAX_TARGETS, or something that is no text.
    """
    named = metadata.get("ocr_target")
    texts = extract_targets(prompt) if named is None else named if isinstance(named, (list, tuple)) else [named]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"the metadata key 'ocr_target' must be a text or a list of texts, got {named!r}")
    if not texts or not all(normalise(text) for text in texts):
        raise ValueError(
            f"no text to look for in {prompt!r}: put it in double quotes or in the metadata key 'ocr_target'"
        )
    if len(texts) > MAX_TARGETS:
        raise ValueError(f"{len(texts)} texts asked for in {prompt!r}; at most {MAX_TARGETS} can be scored")
    return list(texts)


def normalise(text: str) -> str:
    """NFKC, straight quotes, no white space, case folded."""
    return re.sub(r"\s", "", unicodedata.normalize("NFKC", text.translate(_STRAIGHT))).casefold()


def full(read: str, targets: Sequence[str]) -> float:
    """1 - distance / length in [0, 1], where the whole of `read` must be the targets in some order, nothing else.

    Both sides normalised. For several targets this is their mean weighted by length.
    """
    length = sum(map(len, targets))
    distance = min(Levenshtein.distance(read, "".join(order)) for order in permutations(targets))
    return 1 - min(distance, length) / length


def substring(read: str, targets: Sequence[str]) -> float:
    """Mean over targets of Flow-GRPO's rule: 1 when the target occurs in `read`, else 1 - distance / length.

    Extra text is free, so a picture full of letters scores well on short targets: for comparison with published runs.
    """
    return sum(1.0 if target in read else full(read, [target]) for target in targets) / len(targets)


MODES: Mapping[str, Callable[[str, Sequence[str]], float]] = {"full": full, "substring": substring}


def join_lines(lines: Sequence[tuple[Sequence[Sequence[float]], str]]) -> str:
    """lines: (corners [4][2] as x, y in pixels, text). Texts in reading order: by row, then by x.

    A box belongs to the row above when its middle lies within half that row's height of the row's middle.
    """
    boxes = [(_span(corners, 1), _span(corners, 0)[0], text) for corners, text in lines]
    boxes.sort(key=lambda box: sum(box[0]))
    rows: list[list[tuple[tuple[float, float], float, str]]] = []
    for box in boxes:
        (top, bottom), _, _ = box
        if rows:
            (first_top, first_bottom), _, _ = rows[-1][0]
            if abs((top + bottom) - (first_top + first_bottom)) / 2 < (first_bottom - first_top) / 2:
                rows[-1].append(box)
                continue
        rows.append([box])
    return "".join(text for row in rows for _, _, text in sorted(row, key=lambda box: box[1]))


def _span(corners: Sequence[Sequence[float]], axis: int) -> tuple[float, float]:
    along = [float(corner[axis]) for corner in corners]
    return min(along), max(along)
