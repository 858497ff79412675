"""How every command ends: wrong input and Ctrl-C as messages and exit codes, not tracebacks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import typer

__all__ = ["INTERRUPTED", "WRONG_INPUT", "reported"]

WRONG_INPUT, INTERRUPTED = 2, 130


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
