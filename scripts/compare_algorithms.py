"""Compare the algorithms on the embedded model at equal cost: tune, run, report; each goes on where it was stopped.

    python scripts/compare_algorithms.py all

Runs go to `assets/benchmarks/algorithms`, one folder each; what is there is not run again. `status` says what is
missing and how long it is. Several processes of `tune` or `run` share the work: each takes runs that no other is at.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)
FOLDER = Path("assets/benchmarks/algorithms")
SETTINGS = Path("assets/benchmarks/algorithms.yaml")
Settings = Annotated[Path, typer.Option(help="settings file")]
Folder = Annotated[Path, typer.Option(help="journal")]
Only = Annotated[list[str] | None, typer.Option(help="algorithms or rewards to keep to; repeat it for several")]


def _journal(folder: Path, settings: Path) -> Any:
    from flowrl_img.comparison.journal import Journal
    from flowrl_img.comparison.settings import load_settings

    return Journal(folder, load_settings(settings))


def _measure(journal: Any) -> Any:
    """Measures of a run folder with the judge's embedding."""
    import torch

    from flowrl_img.comparison.measure import measure_run
    from flowrl_img.rewards.clip_model import Clip
    from flowrl_img.rewards.images import to_uint8

    torch.set_num_threads(journal.settings.threads)
    judge = journal.settings.judge
    clip = Clip("judge", judge, judge, device_name="cpu")

    def embed(pictures: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return clip.embed_pixels(clip.pixels.pictures(to_uint8(pictures)[0]))

    bases: dict[str, Any] = {}
    pictures = journal.settings.final_pictures
    return lambda run: measure_run(run, pictures=pictures, judge=embed, bases=bases)


def _kept(cells: list[Any], only: list[str] | None) -> list[Any]:
    """Cells of the algorithms that are named, if any are, and of the rewards that are named, if any are."""
    named = set(only or ())
    known = {c.algorithm for c in cells} | {c.reward for c in cells}
    if unknown := named - known:
        raise typer.BadParameter(
            f"--only: no run here is of {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}"
        )
    for field in ("algorithm", "reward"):
        wanted = named & {getattr(c, field) for c in cells}
        cells = [c for c in cells if not wanted or getattr(c, field) in wanted]
    return cells


@app.command()
def tune(folder: Folder = FOLDER, settings: Settings = SETTINGS, only: Only = None) -> None:
    """Run the trials of each algorithm on the tuning split and write the best of each to tuned.json."""
    from flowrl_img.comparison.measure import last_evaluation

    journal = _journal(folder, settings)
    cells = journal.trials()
    for cell in _kept(cells, only):
        if (found := journal.run(cell, last_evaluation)) is not None:
            print(f"{cell.id}: tuning reward {found['after']['reward'][0]:.4f}", flush=True)
    print(journal.choose())


@app.command()
def run(folder: Folder = FOLDER, settings: Settings = SETTINGS, only: Only = None) -> None:
    """Run every cell that is missing, the first seed of everybody first."""
    journal = _journal(folder, settings)
    measure = _measure(journal)
    for cell in _kept(journal.settings.cells(), only):
        if (found := journal.run(cell, measure)) is not None:
            value, low, high = found["gain"]["reward"]
            print(f"{cell.id}: gain {value:+.4f} [{low:+.4f}, {high:+.4f}]", flush=True)


@app.command()
def report(folder: Folder = FOLDER, settings: Settings = SETTINGS) -> None:
    """Write results.json, README.md and the curves into the journal's folder."""
    from flowrl_img.comparison.report import write_report

    elsewhere = (folder, settings) != (FOLDER, SETTINGS)
    options = f" --settings {settings} --folder {folder}" if elsewhere else ""
    write_report(_journal(folder, settings), folder, f"python scripts/compare_algorithms.py all{options}")
    print(folder / "README.md")


@app.command()
def status(folder: Folder = FOLDER, settings: Settings = SETTINGS) -> None:
    """What is done, and the size of what is not."""
    from flowrl_img.comparison.settings import cost_of_rollout

    journal = _journal(folder, settings)
    for cell in [*journal.trials(), *journal.settings.cells()]:
        config = journal.config(cell)
        size = f"{config.run.rollouts} rollouts of {cost_of_rollout(config):,} evaluations"
        print(f"{'done   ' if journal.done(cell) else 'missing'} {cell.id:<36} {size}")


@app.command("all")
def everything(folder: Folder = FOLDER, settings: Settings = SETTINGS) -> None:
    """Tune, run, report."""
    tune(folder, settings, None)
    run(folder, settings, None)
    report(folder, settings)


if __name__ == "__main__":
    app()
