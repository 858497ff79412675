"""Train the two CLIP dual encoders of the embedded world from nothing, on two CPU cores: about 20 minutes each.

Every training resumes where it was killed; `all` runs what is missing. Work files go to `.work/judges`, the encoders to
`assets/judges/held_out` and `assets/judges/reward`.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
WORK, OUT = Path(".work/judges"), Path("assets/judges")
Threads = Annotated[int, typer.Option(help="CPU threads")]


@app.command()
def train(
    name: Annotated[str, typer.Argument(help="held_out or reward")],
    folder: Path = WORK,
    out: Path = OUT,
    threads: Threads = 2,
    steps: Annotated[int | None, typer.Option(help="optimizer steps; default: the plan's")] = None,
    minutes: Annotated[float | None, typer.Option(help="stop early and leave a state to resume from")] = None,
) -> None:
    """Train one encoder; when its steps are done, write it to OUT/NAME and print how it does on the test split."""
    from flowrl_img.pico.judge import JUDGES, preferences, save, train_judge

    if name not in JUDGES:
        raise typer.BadParameter(f"no judge {name!r}; one of {', '.join(JUDGES)}")
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    plan = JUDGES[name] if steps is None else replace(JUDGES[name], steps=steps)
    work = folder / name
    work.mkdir(parents=True, exist_ok=True)
    net = train_judge(work, plan, minutes)
    done = torch.load(work / "judge.pt", weights_only=True)["step"]
    if done < plan.steps:
        print(f"{name}: {done} of {plan.steps} steps; run it again to go on")
        return
    save(net, out / name)
    shutil.copy(work / "judge_log.jsonl", out / name / "judge_log.jsonl")
    print(json.dumps({"judge": name, "prefers the true caption": preferences(net, ("test",))}, indent=1))


@app.command()
def score(out: Path = OUT, threads: Threads = 2, split: str = "test", pictures: int = 2000) -> None:
    """How often each encoder prefers the true caption over one with a wrong attribute, and their size together."""
    from transformers import CLIPModel

    from flowrl_img.pico.judge import JUDGES, preferences

    torch.set_num_threads(threads)
    found = {}
    for name in JUDGES:
        net = CLIPModel.from_pretrained(out / name, dtype=torch.float32).eval()
        found[name] = {k: round(v, 4) for k, v in preferences(net, (split,), pictures).items()}
    size = sum(f.stat().st_size for f in out.rglob("*") if f.is_file()) / 1e6
    print(json.dumps({"split": split, "megabytes": round(size, 2), **found}, indent=1))


@app.command("all")
def everything(folder: Path = WORK, out: Path = OUT, threads: Threads = 2) -> None:
    """Both encoders from nothing."""
    from flowrl_img.pico.judge import JUDGES

    for name in JUDGES:
        train(name, folder, out, threads, None, None)
    score(out, threads)


if __name__ == "__main__":
    app()
