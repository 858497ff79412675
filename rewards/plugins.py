"""Names to objects, with no list to edit.

A name is a dotted path `package.module:Object`, else an entry point of the group, else the module of that name in the
package, which exports (in `__all__`) one class whose `name` is the module's own.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from types import ModuleType
from typing import Any

__all__ = ["builtin_names", "check_options", "resolve"]


def resolve(name: str, *, kind: str, package: str, group: str) -> Any:
    """The object called `name`. kind: the word for error messages ("reward").

    ValueError names the nearest valid name; an import error inside the named module is left as it is.
    """
    if ":" in name:
        return _from_path(name, kind)
    points = {point.name: point for point in metadata.entry_points(group=group)}
    if name in points:
        return points[name].load()
    if name in _module_names(package):
        found = _plugin_of(importlib.import_module(f"{package}.{name}"))
        if found is not None:
            return found
    valid = sorted({*points, *builtin_names(package)})
    raise ValueError(f"unknown {kind} {name!r}{_hint(name, valid)}; valid: {valid}, or a path 'package.module:Object'")


def builtin_names(package: str) -> list[str]:
    """Names of the package's modules that export a plug-in."""
    return [name for name in _module_names(package) if _plugin_of(importlib.import_module(f"{package}.{name}"))]


def check_options(target: Callable[..., Any], options: Mapping[str, Any], *, owner: str, skip: int = 0) -> None:
    """ValueError when `target` does not take one of the options. skip: leading parameters that are no options."""
    parameters = list(inspect.signature(target).parameters.values())[skip:]
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return
    valid = [p.name for p in parameters if p.kind is not inspect.Parameter.VAR_POSITIONAL]
    for option in options:
        if option not in valid:
            raise ValueError(f"{owner} has no option {option!r}{_hint(option, valid)}; valid options: {valid}")


def _from_path(path: str, kind: str) -> Any:
    module, _, attribute = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and (module == error.name or module.startswith(error.name + ".")):
            raise ValueError(f"{kind} {path!r}: no module {error.name!r}; is its folder on the Python path?") from error
        raise
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{kind} {path!r}: {module!r} has no {attribute!r}{_hint(part, dir(found))}")
        found = getattr(found, part)
    return found


def _module_names(package: str) -> list[str]:
    return sorted(info.name for info in pkgutil.iter_modules(importlib.import_module(package).__path__))


def _plugin_of(module: ModuleType) -> Any:
    stem = module.__name__.rpartition(".")[2]
    exported = [getattr(module, key) for key in getattr(module, "__all__", ())]
    return next((found for found in exported if getattr(found, "name", None) == stem), None)


def _hint(word: str, valid: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(valid), n=1)
    return f", did you mean {near[0]!r}?" if near else ""
