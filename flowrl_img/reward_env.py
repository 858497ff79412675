"""A virtual environment for one scorer, where its packages do not go with those of training.

It holds what serving needs, what the scorer needs, and flowrl-img itself without its dependencies, so that a scorer
that pins an old transformers or torch can live beside a run that uses new ones. The run asks it over HTTP.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from flowrl_img import __version__, plugins

__all__ = ["SERVING", "commands", "create"]

# Imported by `flowrl-img rewards serve` whatever it serves; the scorer decides on versions where it cares.
SERVING = ("fastapi", "uvicorn", "numpy", "pillow", "pydantic", "pyyaml", "torch", "typer")


def commands(folder: Path, name: str, packages: Sequence[str]) -> list[list[str]]:
    """What makes the environment of the reward `name` in `folder`, with further `packages`; nothing is run.

    ValueError for an unknown reward, FileExistsError for a folder that is in use.
    """
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty: choose another folder, or remove it")
    needed = getattr(plugins.resolve("rewards", name), "requirements", ())
    pip = [_python(folder), "-m", "pip", "install"]
    return [
        [sys.executable, "-m", "venv", str(folder)],
        [*pip, *SERVING, *needed, *packages],
        [*pip, "--no-deps", _own_source()],
    ]


def create(folder: Path, name: str, packages: Sequence[str], announce: Callable[[str], None]) -> None:
    """Run `commands`, telling each; OSError with the command when one fails."""
    for command in commands(folder, name, packages):
        announce(" ".join(command))
        if subprocess.run(command).returncode:
            raise OSError(f"this command failed: {' '.join(command)}")
    announce(f"ready: {_python(folder)} -m flowrl_img rewards serve {name}")


def _python(folder: Path) -> str:
    return str(folder / ("Scripts" if sys.platform == "win32" else "bin") / "python")


def _own_source() -> str:
    """This checkout, or the release that is installed."""
    root = Path(__file__).resolve().parents[1]
    return str(root) if (root / "pyproject.toml").is_file() else f"flowrl-img=={__version__}"
