"""`flowrl-img evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flowrl_img.commands.common import Recipe, Words, progress_line, reported

__all__ = ["evaluate"]


def evaluate(
    words: Words = None,
    pictures: Annotated[
        int, typer.Option(min=1, help="Pictures, equally many per task, drawn at every strength.")
    ] = 1200,
    scales: Annotated[
        str | None,
        typer.Option(
            help="Strengths of the tuning: 0 base, 1 tuned, 1.6 beyond. 0,1,1.6 or 1:0@0.6 or 2..0.", show_default="0,1"
        ),
    ] = None,
    prompts: Annotated[str | None, typer.Option(help="Prompt file; default: the run's evaluation prompts.")] = None,
    reward: Annotated[list[str] | None, typer.Option(help="A further reward to report; repeatable.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the results; default: inside the run folder.")] = None,
    recipe: Recipe = "pico",
    restart: Annotated[bool, typer.Option("--restart", help="Forget what the folder holds and begin anew.")] = False,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
) -> None:
    """Score base, tuned and blends of them on paired pictures, with intervals; goes on where it was stopped."""
    with reported():
        from flowrl_img.measure import Ask, evaluate_sources

        ask = Ask(recipe, pictures, scales, prompts, tuple(reward or ()), out, threads, restart)
        with progress_line("evaluating") as progress:
            lines = list(evaluate_sources(words or [], ask, progress))
        for line in lines:
            typer.echo(line)
