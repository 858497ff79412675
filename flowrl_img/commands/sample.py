"""`flowrl-img sample`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flowrl_img.commands.common import Recipe, Words, progress_line, reported

__all__ = ["sample"]


def sample(
    words: Words = None,
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; repeatable.")] = None,
    prompts: Annotated[str | None, typer.Option(help="Prompt file (.txt or .jsonl), or a packaged name.")] = None,
    seeds: Annotated[str, typer.Option(help="Seeds: 0,3,8-11.")] = "0",
    scales: Annotated[
        str | None,
        typer.Option(
            help="Strengths of the tuning: 0 base, 1 tuned, 1.6 beyond. 0,1,1.6 or 1:0@0.6 or 2..0.", show_default="1"
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the pictures.")] = Path("samples"),
    layout: Annotated[str, typer.Option(help="single files, a grid, or both.")] = "single",
    recipe: Recipe = "pico",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace pictures of the same names.")] = False,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
) -> None:
    """Draw pictures at one or more strengths of the tuning; their PNG files say how they were made."""
    with reported():
        from flowrl_img.draw import Ask, sample_sources

        ask = Ask(recipe, tuple(prompt or ()), prompts, seeds, scales, layout, out, overwrite, threads)
        with progress_line("drawing") as progress:
            lines = list(sample_sources(words or [], ask, progress))
        for line in lines:
            typer.echo(line)
