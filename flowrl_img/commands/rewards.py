"""`flowrl-img rewards list | info | score | check | serve | env | new`: look at rewards, try them, serve them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from flowrl_img.commands.common import FAILED, reported

__all__ = ["rewards_app"]

rewards_app = typer.Typer(
    help="Look at rewards and try them: list, info, score, check, serve, env, new.", no_args_is_help=True
)

Name = Annotated[str, typer.Argument(help="A built-in, an entry point, or package.module:Object.")]
Options = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Options of the reward: quality=80.")
]


@rewards_app.command("list")
def list_command() -> None:
    """Every reward that needs no path, with a line on what it is."""
    with reported():
        from flowrl_img.reward_commands import list_rewards

        for line in list_rewards():
            typer.echo(line)


@rewards_app.command("info")
def info_command(name: Name, options: Options = None) -> None:
    """What a reward measures, its options, what it needs."""
    with reported():
        from flowrl_img.reward_commands import info

        for line in info(name, _parsed(options)):
            typer.echo(line)


@rewards_app.command("score")
def score_command(
    name: Name,
    images: Annotated[Path, typer.Argument(help="Folder of the pictures.")],
    options: Options = None,
    prompts: Annotated[str, typer.Option(help="A .jsonl or .txt file: a line a picture, or one for all.")] = "",
    out: Annotated[Path | None, typer.Option(help="Write a JSON line for each picture here.")] = None,
) -> None:
    """Score the pictures of a folder."""
    with reported():
        from flowrl_img.reward_commands import score

        if not prompts:
            raise ValueError("say what the pictures should show: --prompts FILE, a .jsonl or .txt file")
        for line in score(name, _parsed(options), images, prompts, out):
            typer.echo(line)


@rewards_app.command("check")
def check_command(
    name: Name,
    options: Options = None,
    images: Annotated[Path | None, typer.Option(help="Pictures of your own; default: scenes of the world.")] = None,
    prompts: Annotated[str | None, typer.Option(help="Their prompts.")] = None,
) -> None:
    """Known answers, determinism, batches, permutation, sensitivity, range and speed; exit code 1 when a law breaks."""
    with reported():
        from flowrl_img.reward_commands import check

        lines, kept = check(name, _parsed(options), images, prompts)
        for line in lines:
            typer.echo(line)
    if not kept:
        raise typer.Exit(FAILED)


@rewards_app.command("serve")
def serve_command(
    words: Annotated[list[str], typer.Argument(metavar="NAME [KEY=VALUE]...", help="Rewards, each with its options.")],
    host: Annotated[str, typer.Option(help="Interface; others than loopback need FLOWRL_REWARD_TOKEN.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port.")] = 8417,
) -> None:
    """Serve rewards over HTTP for `rewards: [{name: remote, ...}]`: serve pickscore model=/models/pick ocr."""
    with reported():
        from flowrl_img.reward_commands import serve

        serve(words, host, port, typer.echo)


@rewards_app.command("env")
def env_command(
    name: Name,
    folder: Annotated[Path, typer.Argument(help="Where the environment is made.")],
    packages: Annotated[list[str] | None, typer.Option("--with", help="A further package; may be repeated.")] = None,
) -> None:
    """A virtual environment of its own for a scorer whose packages clash with yours, to serve it from."""
    with reported():
        from flowrl_img.reward_env import create

        create(folder, name, packages or (), typer.echo)


@rewards_app.command("new")
def new_command(folder: Annotated[Path, typer.Argument(help="Where to write it; its name is the reward's.")]) -> None:
    """A package with a reward of your own to edit: code, entry point and test."""
    with reported():
        from flowrl_img.reward_commands import new

        for line in new(folder):
            typer.echo(line)


def _parsed(options: list[str] | None) -> dict[str, Any]:
    """`quality=80 thresholds.score=0.5` as nested options."""
    from flowrl_img.recipes import apply_override, parse_override

    found: dict[str, Any] = {}
    for option in options or ():
        apply_override(found, *parse_override(option))
    return found
