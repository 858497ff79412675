"""What commands share: messages and exit codes of wrong input, the words TUNED and KEY=VALUE, a progress line."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

__all__ = ["FAILED", "INTERRUPTED", "WRONG_INPUT", "Recipe", "Words", "progress_line", "reported"]

FAILED, WRONG_INPUT, INTERRUPTED = 1, 2, 130

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[TUNED]... [KEY=VALUE]...",
        help="Run folders, LoRA files or folders, folders with a tuned transformer/, or hub ids; then changes of the "
        "configuration: evaluation.steps=28.",
    ),
]
Recipe = Annotated[str, typer.Option(help="Configuration (model, prompts, rewards) where TUNED holds no run folder.")]


@contextmanager
def reported() -> Iterator[None]:
    """Wrong input and Ctrl-C as messages and exit codes."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        raise typer.Exit(INTERRUPTED) from None
    except (ValueError, OSError) as error:
        if os.environ.get("FLOWRL_TRACEBACK") == "1":
            raise
        for line in str(error).splitlines() or [type(error).__name__]:
            typer.echo(f"error: {line}", err=True)
        raise typer.Exit(WRONG_INPUT) from None


@contextmanager
def progress_line(what: str) -> Iterator[Callable[[int, int], None]]:
    """A function of (done, total) that moves a bar with the time left; on a terminal only."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
