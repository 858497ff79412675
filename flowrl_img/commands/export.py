"""`flowrl-img export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flowrl_img.commands.common import FAILED, reported

__all__ = ["export"]


def export(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    out: Annotated[Path | None, typer.Option(help="Folder to write; default: export/ in the run folder.")] = None,
    format: Annotated[
        list[str] | None,
        typer.Option(help="lora (diffusers), comfyui, or merged (whole weights); repeatable.", show_default="lora"),
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="ema or current.", show_default="ema, where the run kept one")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Precision of merged weights: fp32, bf16 or fp16.")] = "fp32",
    verify: Annotated[bool, typer.Option(help="Reload every file with stock diffusers and compare outputs.")] = True,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier export.")] = False,
) -> None:
    """Write a run's tuned weights for other programs, proven to load there, with a model card."""
    with reported():
        from flowrl_img.export.run import Ask, export_run
        from flowrl_img.export.verify import VerificationError

        try:
            for line in export_run(run, Ask(out, tuple(format or ()), weights, dtype, verify, overwrite)):
                typer.echo(line)
        except VerificationError as error:
            for line in str(error).splitlines():
                typer.echo(f"error: {line}", err=True)
            raise typer.Exit(FAILED) from None
