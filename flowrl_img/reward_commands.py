"""What `flowrl-img rewards` does behind the command line: every function gives the lines to print."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flowrl_img import plugins
from flowrl_img.folders import writable
from flowrl_img.pictures import load_pictures
from flowrl_img.recipes import apply_override, parse_override
from flowrl_img.resources import assets
from flowrl_img.rewards import registry
from flowrl_img.rewards.audit import audit, calibration_set
from flowrl_img.rewards.failures import FailureBudget
from flowrl_img.rewards.mixture import reporting
from flowrl_img.rewards.protocol import Reward, RewardBatch
from flowrl_img.rewards.score import Scorer

__all__ = ["check", "info", "list_rewards", "new", "score", "serve"]


def list_rewards() -> Iterator[str]:
    """A line for each reward that needs no path: built-ins and entry points."""
    for name in registry.builtins():
        yield f"{name:<16}{_first_line(plugins.resolve('rewards', name))}"


def info(name: str, options: Mapping[str, Any]) -> Iterator[str]:
    """What a reward is, its options with their values, what it needs and offers."""
    found = plugins.resolve("rewards", name)
    yield f"{name}: {found.__module__}"
    for text in (inspect.getmodule(found), found):
        yield from [*(inspect.getdoc(text) or "").splitlines(), ""]
    for parameter in _parameters(found):
        value = options.get(parameter.name, parameter.default)
        yield f"  {parameter.name:<20} {'(required)' if value is parameter.empty else repr(value)}"
    yield f"needs metadata: {', '.join(sorted(getattr(found, 'needs', ()))) or 'none'}"
    yield f"scope: {getattr(found, 'scope', 'point')}"
    yield f"gradients to the picture: {_yes(hasattr(found, 'differentiable'))}"
    yield f"known answers at start-up: {_yes(hasattr(found, 'known_answers'))}"
    wanted = getattr(found, "requirements", ())
    if wanted:
        yield f"packages of its own environment: {', '.join(wanted)}"


def score(name: str, options: Mapping[str, Any], folder: Path, prompts: str, out: Path | None) -> Iterator[str]:
    """Score the pictures of a folder: one line each, and a JSON line each into `out`."""
    reward = registry.load(name, **options)
    batches = load_pictures(folder, prompts)
    for batch in batches:
        reward.validate(batch.prompts, batch.metadata)
    if out is not None:
        writable(out.parent, "--out")
    scorer = Scorer(reward, failures=FailureBudget("mask", share=1.0))
    rows = sorted(row for batch in batches for row in _rows(scorer, batch))
    if out is not None:
        lines = [json.dumps({"file": file, "score": value, **details}) for file, value, _, details in rows]
        out.write_text("\n".join(lines) + "\n")
    for file, value, reason, _ in rows:
        yield f"{file}  {'invalid: ' + reason if value is None else f'{value:.6g}'}"
    valid = [value for _, value, _, _ in rows if value is not None]
    mean = f"mean {sum(valid) / len(valid):.6g}, " if valid else ""
    yield f"{mean}{len(valid)} of {len(rows)} scored in {scorer.seconds:.2f} s"


def _rows(scorer: Scorer, batch: RewardBatch) -> Iterator[tuple[str, float | None, str, dict[str, Any]]]:
    output = scorer(batch)
    for row, (file, value, ok) in enumerate(zip(batch.ids, output.values.tolist(), output.valid.tolist(), strict=True)):
        details = {key: column[row] for key, column in output.details.items() if column[row] is not None}
        yield file, value if ok else None, str(details.get("error", "no reason given")), details


def check(name: str, options: Mapping[str, Any], folder: Path | None, prompts: str | None) -> tuple[list[str], bool]:
    """The audit of a reward on its calibration set or on given pictures: lines, and whether every law is kept."""
    reward = registry.load(name, **options)
    findings = audit(reward, _pictures(reward, folder, prompts))
    signs = {None: " ", True: "+", False: "!"}
    lines = [f"{signs[finding.ok]} {finding.name:<28} {finding.text}" for finding in findings]
    return lines, not any(finding.ok is False for finding in findings)


def serve(words: Sequence[str], host: str, port: int, announce: Callable[[str], None]) -> None:
    """Serve the rewards of `NAME [key=value ...] [NAME ...]` until interrupted; a key belongs to the name before it."""
    from flowrl_img.rewards import server
    from flowrl_img.rewards.addresses import TOKEN_VARIABLE, secret_of

    sections = _sections(words)
    scorers = [reporting(registry.build_part(section, f"reward {section['name']!r}").scorer) for section in sections]
    labels = [scorer.label for scorer in scorers]
    if len(set(labels)) != len(labels):
        raise ValueError(f"two rewards would be served under one name: {', '.join(labels)}; set label=... for one")
    token = secret_of(TOKEN_VARIABLE)
    announce(f"serving {', '.join(labels)} on http://{host}:{port}{', with a token' if token else ''}")
    server.serve(dict(zip(labels, scorers, strict=True)), host, port, token)


def _sections(words: Sequence[str]) -> list[dict[str, Any]]:
    sections: list[dict[str, Any]] = []
    for word in words:
        if "=" not in word:
            sections.append({"name": word})
        elif not sections:
            raise ValueError(f"{word!r} stands before any reward: write the name first, then its keys")
        else:
            apply_override(sections[-1], *parse_override(word))
    return sections


def new(folder: Path) -> Iterator[str]:
    """A package with a reward of one's own, ready to install, named as `folder` is."""
    name = folder.name
    if not (name.isidentifier() and name.islower()):
        raise ValueError(f"{name!r} cannot name a Python module: use lower-case letters, digits and _")
    if folder.exists():
        raise FileExistsError(f"{folder} exists already: choose another folder")
    folder.mkdir(parents=True)
    for source in sorted((assets() / "reward_template").iterdir()):
        text = source.read_text().replace("Sharpness", _class_name(name)).replace("sharpness", name)
        (folder / source.name.replace("sharpness", name)).write_text(text)
    yield f"{folder}: edit {name}.py, then `pip install -e {folder}` and `flowrl-img rewards check {name}`"


def _class_name(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))


def _pictures(reward: Reward, folder: Path | None, prompts: str | None) -> RewardBatch:
    if (folder is None) != (prompts is None):
        raise ValueError("pictures need prompts: give --images and --prompts together, or neither")
    if folder is None or prompts is None:
        return calibration_set(reward)
    [first, *rest] = load_pictures(folder, prompts)
    if rest or len(first) < 2:
        raise ValueError(f"{folder}: a check needs two pictures or more, all of one size")
    reward.validate(first.prompts, first.metadata)
    return first


def _first_line(found: Any) -> str:
    text = inspect.getdoc(inspect.getmodule(found)) or inspect.getdoc(found) or ""
    return text.partition("\n")[0]


def _parameters(found: Any) -> Sequence[inspect.Parameter]:
    if not (inspect.isclass(found) or inspect.isroutine(found)):
        return ()
    parameters = list(inspect.signature(found).parameters.values())
    fields = {f.name: f for f in dataclasses.fields(found)} if dataclasses.is_dataclass(found) else {}
    made = {name: f.default_factory() for name, f in fields.items() if f.default_factory is not dataclasses.MISSING}
    shown = [p.replace(default=made[p.name]) if p.name in made else p for p in parameters]
    return shown if inspect.isclass(found) else shown[3:]


def _yes(flag: bool) -> str:
    return "yes" if flag else "no"
