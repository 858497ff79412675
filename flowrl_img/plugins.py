"""Names to objects: one rule for objectives, rewards, step rules, windows and model families.

A name is a dotted path `package.module:Object`, an entry point of the group `flowrl_img.<kind>`, or a built-in module of
that name. A built-in module exports one object as its first name in `__all__`; the fields of that object (a dataclass)
are its config section. A leaf: standard library only.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import pkgutil
from collections.abc import Iterable, Mapping
from importlib.metadata import entry_points
from typing import Any

__all__ = ["available", "build", "nearest", "resolve"]

PACKAGES = {
    "objectives": "flowrl_img.objectives",
    "steps": "flowrl_img.samplers.steps",
    "models": "flowrl_img.models",
}


def nearest(word: str, choices: Iterable[str]) -> str:
    """`; did you mean 'x'?` and the choices, to end an error message with."""
    known = sorted(choices)
    match = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    hint = f"did you mean {match[0]!r}? " if match else ""
    return f"{hint}valid: {', '.join(known)}"


def available(kind: str) -> list[str]:
    """Names of `kind` that need no dotted path: entry points and built-ins."""
    package = importlib.import_module(PACKAGES[kind])
    builtin = [m.name for m in pkgutil.iter_modules(package.__path__) if not m.name.startswith("_")]
    return sorted({*builtin, *(e.name for e in entry_points(group=f"flowrl_img.{kind}"))})


def resolve(kind: str, name: str) -> Any:
    """The object behind `name`. Raises ValueError that names the nearest valid one."""
    if ":" in name:
        module, _, attribute = name.partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"{kind}: cannot load {name!r}: {error}") from error
    for entry in entry_points(group=f"flowrl_img.{kind}", name=name):
        return entry.load()
    if name not in available(kind):
        raise ValueError(f"unknown {kind} name {name!r}; {nearest(name, available(kind))}")
    module = importlib.import_module(f"{PACKAGES[kind]}.{name}")
    return getattr(module, module.__all__[0])


def build(kind: str, section: Mapping[str, Any]) -> Any:
    """Instantiate `{"name": ..., **fields}`. Raises ValueError for an unknown field, naming the nearest valid one."""
    options = dict(section)
    target = resolve(kind, options.pop("name"))
    if dataclasses.is_dataclass(target):
        fields = {f.name for f in dataclasses.fields(target) if f.init}
        for key in options:
            if key not in fields:
                raise ValueError(f"{kind}.{section['name']}: unknown key {key!r}; {nearest(key, fields)}")
    return target(**options)
