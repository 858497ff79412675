"""Names to objects: one rule for objectives, samplers, models, rewards, transforms, detectors, with no list to edit.

A name is a path `package.module:Object`, else an entry point of the group `flowrl_img.<kind>`, else a built-in: the
module of that name, which exports (in `__all__`) one object whose `name` is the module's own; kinds of a few lines each
(times, decays) share one module, and their objects go by their `name`. The parameters of an object are its config
section, and their annotations say which values are allowed. A leaf of the house: every room may use it.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import math
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from typing import Any, get_type_hints

__all__ = ["available", "build", "check_options", "make", "nearest", "resolve"]

PACKAGES: Mapping[str, str] = {
    "objectives": "flowrl_img.objectives",
    "steps": "flowrl_img.samplers.steps",
    "solvers": "flowrl_img.samplers.solvers",
    "times": "flowrl_img.samplers.times",
    "decays": "flowrl_img.decays",
    "models": "flowrl_img.models",
    "rewards": "flowrl_img.rewards",
    "detectors": "flowrl_img.rewards.detectors",
    "transforms": "flowrl_img.rewards.transforms",
}


def nearest(word: str, choices: Iterable[str]) -> str:
    """`did you mean 'x'? valid: x, y` to end an error message with."""
    known = sorted(choices)
    match = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    hint = f"did you mean {match[0]!r}? " if match else ""
    return f"{hint}valid: {', '.join(known) or 'none'}"


def available(kind: str) -> list[str]:
    """Names of `kind` that need no path: entry points and built-ins."""
    builtin = [name for name in _module_names(kind) if _builtin(kind, name) is not None]
    return sorted({*builtin, *(point.name for point in metadata.entry_points(group=f"flowrl_img.{kind}"))})


def resolve(kind: str, name: str, where: str | None = None) -> Any:
    """The object behind `name`. ValueError names the nearest valid one, or what stops a module from being imported.

    where: its place in the config, for messages; the kind's own word where it is left out.
    """
    noun = kind.removesuffix("s")
    where = where or noun
    if ":" in name:
        module, _, attribute = name.partition(":")
        return _from_path(module, attribute, where)
    for point in metadata.entry_points(group=f"flowrl_img.{kind}"):
        if point.name == name:
            return _from_path(point.module, point.attr, where)
    if name not in _module_names(kind):
        known = nearest(name, available(kind))
        raise ValueError(f"{where}: no {noun} is called {name!r}; {known}, or a path package.module:Object")
    found = _builtin(kind, name)
    if found is None:
        module = f"{PACKAGES[kind]}.{name}"
        raise ValueError(
            f"{where}: {module} exports no {noun} (nothing in its __all__ has name = {name!r}); "
            f"{nearest(name, available(kind))}"
        )
    return found


def build(kind: str, section: Mapping[str, Any], where: str | None = None) -> Any:
    """The object of `{"name": ..., **options}`; see `resolve` and `make` for what is refused."""
    options = dict(section)
    where = where or kind.removesuffix("s")
    return make(resolve(kind, options.pop("name"), where), options, where)


def make(target: Any, options: Mapping[str, Any], where: str) -> Any:
    """A class or function called with the options; any other object is ready and takes none.

    ValueError for options that `check_options` or the object itself refuses.
    """
    if not (inspect.isclass(target) or inspect.isroutine(target)):
        if options:
            raise ValueError(f"{where}: this object is already built and takes no keys, got {', '.join(options)}")
        return target
    checked = check_options(target, options, where)
    try:
        return target(**checked)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error


def check_options(
    target: Callable[..., Any], options: Mapping[str, Any], where: str, *, skip: int = 0
) -> dict[str, Any]:
    """The options as `target` annotates its parameters: lists become tuples, mappings the dataclasses they describe.

    ValueError for an unknown key (naming the nearest), a missing one, and a value that its annotation refuses.
    skip: leading parameters that are no options.
    """
    parameters = list(inspect.signature(target).parameters.values())[skip:]
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    for key in options:
        if key not in named and not takes_any:
            raise ValueError(f"{where}: unknown key {key!r}; {nearest(key, named)}")
    missing = [key for key, p in named.items() if p.default is p.empty and key not in options]
    if missing:
        raise ValueError(f"{where}: missing key {', '.join(missing)}")
    hints = _hints(target)
    return {key: _converted(value, hints.get(key, Any), f"{where}.{key}") for key, value in options.items()}


def _hints(target: Any) -> dict[str, Any]:
    """Annotations of the parameters of a class or function."""
    owner = target.__init__ if inspect.isclass(target) and not dataclasses.is_dataclass(target) else target
    try:
        return get_type_hints(owner)
    except NameError:  # a name imported for type checkers alone: no value can be checked against it
        return {}


def _converted(value: Any, hint: Any, where: str) -> Any:
    from pydantic import ConfigDict, TypeAdapter, ValidationError

    if isinstance(value, float) and math.isnan(value):
        raise ValueError(f"{where} = {value!r}: should be a number")
    if dataclasses.is_dataclass(hint):
        if isinstance(value, Mapping):
            return make(hint, value, where)
        if not isinstance(value, hint):  # type: ignore[arg-type]
            keys = ", ".join(field.name for field in dataclasses.fields(hint) if field.init)
            raise ValueError(f"{where} = {value!r}: should be a mapping with the keys {keys}")
        return value
    try:
        return TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True)).validate_python(value)
    except ValidationError as error:
        message = error.errors()[0]["msg"].removeprefix("Input ")
        raise ValueError(f"{where} = {value!r}: {message}") from None


def _module_names(kind: str) -> list[str]:
    """Modules of the kind's package, or the names in its one module."""
    home = importlib.import_module(PACKAGES[kind])
    if not hasattr(home, "__path__"):
        return [name for found in _exported(home) if (name := getattr(found, "name", None))]
    return [info.name for info in pkgutil.iter_modules(home.__path__)]


def _builtin(kind: str, name: str) -> Any:
    """What the kind's module exports under this name; None for a module that only helps others."""
    home = importlib.import_module(PACKAGES[kind])
    module = importlib.import_module(f"{PACKAGES[kind]}.{name}") if hasattr(home, "__path__") else home
    return next((found for found in _exported(module) if getattr(found, "name", None) == name), None)


def _exported(module: Any) -> list[Any]:
    return [getattr(module, key) for key in getattr(module, "__all__", ())]


def _from_path(module: str, attribute: str, where: str) -> Any:
    """`attribute` (dots allowed) of `module`, a missing module told from one whose own imports fail."""
    if not module or not attribute:
        raise ValueError(f"{where}: {module}:{attribute} is no path; write package.module:Object")
    try:
        found: Any = importlib.import_module(module)
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            raise ValueError(f"{where}: no module {error.name!r}; is its folder on the Python path?") from error
        raise ValueError(f"{where}: importing {module!r} failed inside it: {error}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            names = [name for name in dir(found) if not name.startswith("_")]
            raise ValueError(f"{where}: {module!r} has no {attribute!r}; {nearest(part, names)}")
        found = getattr(found, part)
    return found
