"""The command line: `flowrl-img train|evaluate|sample|export`, `flowrl-img recipes ...`, `flowrl-img rewards ...`.

Nothing heavy is imported before a command needs it. A wrong input ends with `error:` lines on stderr and exit code 2,
Ctrl-C with 130. FLOWRL_TRACEBACK=1 shows the traceback of a wrong input.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from flowrl_img.commands.common import reported
from flowrl_img.commands.evaluate import evaluate
from flowrl_img.commands.export import export
from flowrl_img.commands.rewards import rewards_app
from flowrl_img.commands.sample import sample

if TYPE_CHECKING:
    from flowrl_img.config import Config

__all__ = ["main"]

DEFAULT_RECIPE = "pico"

app = typer.Typer(
    name="flowrl-img",
    help="RL fine-tuning of diffusion and flow-matching image generators.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
recipes_app = typer.Typer(help="Look at recipes: list, show.", no_args_is_help=True)
app.add_typer(recipes_app, name="recipes")
app.add_typer(rewards_app, name="rewards")

Arguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="[RECIPE] [KEY=VALUE]...", help="Recipe name or .yaml file, then changes: run.seed=3."),
]


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the console script; leaves through SystemExit with the exit code."""
    app(args=None if argv is None else list(argv), prog_name="flowrl-img")


def _version(show: bool) -> None:
    if show:
        from flowrl_img import __version__

        typer.echo(__version__)
        raise typer.Exit


Version = Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")]


@app.callback()
def _options(version: Version = False) -> None:
    pass


@app.command()
def train(
    arguments: Arguments = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, print the plan and stop.")] = False,
    run_folder: Annotated[str | None, typer.Option("--run-folder", help="Where the run is kept (run.folder).")] = None,
) -> None:
    """Train with RECIPE (default: the embedded model, pico), changed by KEY=VALUE."""
    with reported():
        config = _load(arguments, run_folder)
        _print_plan(config)
        from flowrl_img.run import check_inputs, run_training

        if dry_run:
            missing = check_inputs(config)
            for file in missing if _processes()[0] == 0 else ():
                typer.echo(f"to bring before training: the prompt file {file}")
            return
        code = run_training(config)
    raise typer.Exit(code)


app.command()(evaluate)
app.command()(sample)
app.command()(export)


@recipes_app.command("list")
def list_recipes() -> None:
    """Names and descriptions of the packaged recipes."""
    with reported():
        from flowrl_img import recipes

        names = recipes.names()
        width = max(map(len, names)) + 2
        for name in names:
            typer.echo(f"{name:<{width}}{recipes.describe(name)}")


@recipes_app.command("show")
def show_recipe(arguments: Arguments = None) -> None:
    """The whole configuration of RECIPE, defaults and KEY=VALUE changes included, as YAML."""
    with reported():
        from flowrl_img import recipes

        typer.echo(recipes.to_yaml(_load(arguments)), nl=False)


def _load(arguments: list[str] | None, run_folder: str | None = None) -> Config:
    """The configuration of `[RECIPE] [KEY=VALUE ...]`."""
    from flowrl_img import recipes

    words = list(arguments or ())
    recipe = words.pop(0) if words and "=" not in words[0] else DEFAULT_RECIPE
    stray = [word for word in words if "=" not in word]
    if stray:
        raise ValueError(f"one recipe at a time: {stray[0]!r} is neither the first word nor key=value")
    if run_folder is not None:
        words.append(f"run.folder={run_folder!r}")
    return recipes.load(recipe, words)


def _processes() -> tuple[int, int]:
    """(rank, processes) as `accelerate launch` and torchrun set them."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _print_plan(config: Config) -> None:
    """Check the configuration for this many processes; the first one prints the plan."""
    from rich.console import Console

    from flowrl_img.validation import validate

    rank, processes = _processes()
    plan = validate(config, processes)
    if rank == 0:
        Console().print(plan.render())


if __name__ == "__main__":
    main()
