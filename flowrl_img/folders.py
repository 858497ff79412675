"""Folders that a command writes to, tried before any model is loaded."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["writable"]


def writable(folder: Path, option: str) -> Path:
    """Make `folder` if it is missing and try to write there. OSError names the option to change."""
    probe = folder / f".write-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise OSError(f"cannot write to {folder}: {error.strerror}; give another folder with {option}") from error
    return folder
