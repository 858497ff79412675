"""Names to objects: one rule for objectives, rewards, step rules, windows and model families.

A name is a dotted path `package.module:Object`, an entry point of the group `flowrl_img.<kind>`, or a built-in module
of that name. A built-in module exports one object as its first name in `__all__`; the fields of that object (a
dataclass) are its config section, and their annotations say which values are allowed. Rewards have a rule of the same
shape of their own (`flowrl_img.rewards.plugins`), since that room stands without this one.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import pkgutil
from collections.abc import Iterable, Mapping
from importlib.metadata import entry_points
from typing import Any, get_type_hints

__all__ = ["available", "build", "nearest", "resolve"]

PACKAGES = {
    "objectives": "flowrl_img.objectives",
    "steps": "flowrl_img.samplers.steps",
    "models": "flowrl_img.models",
}


def nearest(word: str, choices: Iterable[str]) -> str:
    """`did you mean 'x'? valid: x, y` to end an error message with."""
    known = sorted(choices)
    match = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    hint = f"did you mean {match[0]!r}? " if match else ""
    return f"{hint}valid: {', '.join(known)}"


def available(kind: str) -> list[str]:
    """Names of `kind` that need no dotted path: entry points and built-ins."""
    package = importlib.import_module(PACKAGES[kind])
    builtin = [m.name for m in pkgutil.iter_modules(package.__path__) if _exported(kind, m.name) is not None]
    return sorted({*builtin, *(e.name for e in entry_points(group=f"flowrl_img.{kind}"))})


def _exported(kind: str, name: str) -> Any:
    """The object a built-in module exports; None for a module that only holds types, such as the protocol itself."""
    module = importlib.import_module(f"{PACKAGES[kind]}.{name}")
    found = getattr(module, module.__all__[0])
    return None if getattr(found, "_is_protocol", False) else found


def resolve(kind: str, name: str, where: str | None = None) -> Any:
    """The object behind `name`. Raises ValueError that names the nearest valid one. where: its place in the config."""
    where = where or kind
    if ":" in name:
        module, _, attribute = name.partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"{where}: cannot load {name!r}: {error}") from error
    for entry in entry_points(group=f"flowrl_img.{kind}", name=name):
        return entry.load()
    if name not in available(kind):
        raise ValueError(f"{where}: no {kind.removesuffix('s')} is called {name!r}; {nearest(name, available(kind))}")
    return _exported(kind, name)


def build(kind: str, section: Mapping[str, Any], where: str | None = None) -> Any:
    """Instantiate `{"name": ..., **fields}`.

    Raises ValueError for an unknown field (naming the nearest valid one) and for a value that its annotation or the
    object itself refuses. where: the place of the section in the config, for messages.
    """
    where = where or kind
    options = dict(section)
    target = resolve(kind, options.pop("name"), where)
    if dataclasses.is_dataclass(target):
        options = _checked_fields(target, options, where)
    try:
        return target(**options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error


def _checked_fields(target: Any, options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The options converted to the annotated types of the dataclass `target` (lists become tuples)."""
    from pydantic import ConfigDict, TypeAdapter, ValidationError

    fields = {f.name for f in dataclasses.fields(target) if f.init}
    hints = get_type_hints(target)
    anything = ConfigDict(arbitrary_types_allowed=True)
    checked = {}
    for key, value in options.items():
        if key not in fields:
            raise ValueError(f"{where}: unknown key {key!r}; {nearest(key, fields)}")
        try:
            checked[key] = TypeAdapter(hints[key], config=anything).validate_python(value)
        except ValidationError as error:
            message = error.errors()[0]["msg"].removeprefix("Input ")
            raise ValueError(f"{where}.{key} = {value!r}: {message}") from None
    return checked
