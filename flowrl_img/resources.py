"""Where packaged data lies: recipes, prompts and the embedded model, in a checkout as in an installed wheel."""

from __future__ import annotations

from pathlib import Path

__all__ = ["asset", "assets"]

PACKAGE = Path(__file__).resolve().parent


def assets() -> Path:
    """The folder of packaged data: inside the package when installed, beside it in a checkout."""
    installed = PACKAGE / "assets"
    return installed if installed.is_dir() else PACKAGE.parent / "assets"


def asset(path: str) -> Path:
    """The packaged file or folder at `path`, relative to the data folder, with forward slashes.

    Raises FileNotFoundError naming the place that was searched. Example: asset("recipes/pico.yaml").
    """
    found = assets() / path
    if not found.exists():
        raise FileNotFoundError(f"no packaged file {path!r} in {assets()}: reinstall flowrl-img or run from a checkout")
    return found
