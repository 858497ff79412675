"""The per-picture rows of an evaluation on disk, so that one that was killed goes on where it stopped.

A folder holds `settings.json`, which fixes what a row means, and `scores-<rank>.jsonl`, one row for each picture and
variant, appended by the process that drew it. Rows are joined by (variant, sample id): how many processes wrote them,
and in which order, changes nothing. A line that was cut off by a kill is dropped and its picture drawn again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Ledger", "Row"]

SETTINGS = "settings.json"


@dataclass(frozen=True)
class Row:
    """One scored picture. Example: Row("w=1.6", "test/3/0", {"reward": 0.8, "ocr": nan}, "AAEC...")."""

    variant: str
    sample: str
    scores: Mapping[str, float]
    thumb: str

    def to_json(self) -> str:
        """One line; NaN is null."""
        scores = {name: None if math.isnan(value) else value for name, value in self.scores.items()}
        return json.dumps({"variant": self.variant, "sample": self.sample, "scores": scores, "thumb": self.thumb})

    @classmethod
    def from_json(cls, line: str) -> Row:
        """ValueError or KeyError for a line that is no row."""
        row = json.loads(line)
        scores = {name: math.nan if value is None else float(value) for name, value in row["scores"].items()}
        return cls(row["variant"], row["sample"], scores, row["thumb"])


class Ledger:
    """The rows of a folder: those on disk when it is opened, and those added since by this process."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.file = folder, folder / f"scores-{rank}.jsonl"
        if self.file.exists():
            _drop_cut_line(self.file)

    def check_settings(self, settings: Mapping[str, Any]) -> None:
        """Write the settings of a new folder. ValueError if an old one was made with others."""
        file, wanted = self.folder / SETTINGS, json.loads(json.dumps(settings))
        if not file.exists():
            file.write_text(json.dumps(wanted, indent=1))
            return
        held = json.loads(file.read_text())
        differing = [key for key in {**held, **wanted} if held.get(key) != wanted.get(key)]
        if differing:
            key = differing[0]
            raise ValueError(
                f"{self.folder} holds an evaluation with other settings ({', '.join(differing)}; {key} was "
                f"{held.get(key)!r}, is {wanted.get(key)!r}): "
                "give another folder with --out, or --restart to begin anew"
            )

    def clear(self) -> None:
        """Forget every row and setting in the folder."""
        for file in [*self.folder.glob("scores-*.jsonl"), self.folder / SETTINGS]:
            file.unlink(missing_ok=True)

    def rows(self) -> dict[tuple[str, str], Row]:
        """Every row of every process, by (variant, sample id)."""
        found = {}
        for file in sorted(self.folder.glob("scores-*.jsonl")):
            lines = file.read_text().split("\n")
            for number, line in enumerate(lines[:-1], start=1):  # the last has no newline: it is being written, or cut
                try:
                    row = Row.from_json(line)
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    raise ValueError(
                        f"{file}, line {number} is no row of an evaluation ({error}); --restart begins anew"
                    ) from None
                found[row.variant, row.sample] = row
        return found

    def append(self, rows: Sequence[Row]) -> None:
        """Write rows, whole lines at once."""
        with self.file.open("a") as file:
            file.write("".join(row.to_json() + "\n" for row in rows))


def _drop_cut_line(file: Path) -> None:
    """Cut the file after its last newline."""
    data = file.read_bytes()
    if not data.endswith(b"\n"):
        with file.open("r+b") as stream:
            stream.truncate(data.rfind(b"\n") + 1)
