"""Recipes: YAML files of the run configuration, found by packaged name or by path, changed by `key=value`.

Left out on purpose: inheritance between recipes and interpolation. A recipe states what differs from the defaults of
`flowrl_img.config`, and nothing else reaches a run.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from flowrl_img.config import Config
from flowrl_img.plugins import nearest
from flowrl_img.resources import assets

__all__ = ["apply_override", "config_keys", "describe", "find", "load", "names", "parse_override", "read", "to_yaml"]


class _Loader(yaml.SafeLoader):
    """YAML with two traps removed: a key given twice is an error, and 3e-4 is a number (YAML 1.2), not a string."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise ValueError(f"key {key!r} stands twice in one section{_line(node.start_mark)}: keep one")
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def names() -> list[str]:
    """Names of the packaged recipes."""
    return sorted(path.stem for path in (assets() / "recipes").glob("*.yaml"))


def find(recipe: str) -> Path:
    """The file of a packaged name (`pico`) or a path (`my/run.yaml`). Raises ValueError naming the nearest recipe."""
    if recipe in names():
        return assets() / "recipes" / f"{recipe}.yaml"
    path = Path(recipe)
    if path.is_file():
        return path
    if path.suffix in {".yaml", ".yml"} or len(path.parts) > 1:
        raise ValueError(f"no recipe file {recipe!r}: give the path of a YAML file or one of {', '.join(names())}")
    raise ValueError(f"unknown recipe {recipe!r}; {nearest(recipe, names())}, or the path of a .yaml file")


def load(recipe: str, overrides: Sequence[str] = ()) -> Config:
    """The configuration of `recipe` after `key=value` overrides. Every mistake is a ValueError, one line each."""
    path = find(recipe)
    data = {"name": path.stem, **read(path)}
    for override in overrides:
        apply_override(data, *parse_override(override))
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        raise ValueError("\n".join(_explain(item) for item in error.errors(include_url=False))) from None


def read(path: Path) -> dict[str, Any]:
    """The mapping in a recipe file."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    data = _parse(text, str(path))
    if not isinstance(data, dict):
        raise ValueError(f"{path}: a recipe is a mapping of sections, got {type(data).__name__}")
    return data


def describe(name: str) -> str:
    """The description line of a recipe."""
    return str(read(find(name)).get("description", ""))


def parse_override(text: str) -> tuple[tuple[str, ...], Any]:
    """`run.seed=3` -> (("run", "seed"), 3): a dotted key and a YAML value, `rewards=[{name: ocr}]` included."""
    key, equals, value = text.partition("=")
    parts = tuple(key.strip().split("."))
    if not equals or not all(parts):
        raise ValueError(f"{text!r} is no override: write section.key=value, for example run.seed=3")
    return parts, _parse(value, f"the value of {key.strip()}")


def apply_override(data: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    """Set `value` in nested mappings and lists (`rewards.0.weight`), making the sections that are missing."""
    place: Any = data
    for depth, key in enumerate(keys[:-1]):
        if isinstance(place, dict):
            if place.get(key) is None:
                place[key] = {}
            place = place[key]
        else:
            place = place[_position(place, key, keys[:depth])]
    if isinstance(place, dict):
        place[keys[-1]] = value
    else:
        place[_position(place, keys[-1], keys[:-1])] = value


def config_keys() -> list[str]:
    """Every dotted key of the configuration, sections included."""
    return list(_walk(Config, ""))


def to_yaml(config: Config) -> str:
    """The whole configuration, defaults written out, as a recipe that gives the same configuration again."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=110)


def _parse(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _Loader)  # a SafeLoader
    except yaml.YAMLError as error:
        place = _line(getattr(error, "problem_mark", None))
        raise ValueError(f"{where} is not YAML{place}: {getattr(error, 'problem', None) or error}") from None
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _line(mark: yaml.Mark | None) -> str:
    return f" (line {mark.line + 1})" if mark is not None else ""


def _position(place: Any, key: str, parents: Sequence[str]) -> int:
    where = ".".join(parents)
    if not isinstance(place, list):
        raise ValueError(f"{where} = {place!r} is a value and has no key {key!r} inside")
    if not key.isdecimal() or int(key) >= len(place):
        raise ValueError(f"{where} is a list of {len(place)}: {key!r} must be a position from 0 to {len(place) - 1}")
    return int(key)


def _walk(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield prefix + name
        for section in _sections(field.annotation):
            if section.model_config.get("extra") != "allow":  # a plug-in: its keys are not known here
                yield from _walk(section, f"{prefix}{name}.")


def _sections(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) in (Union, UnionType):
        for option in get_args(annotation):
            yield from _sections(option)


def _explain(item: Any) -> str:
    """One pydantic error as `key = value: what is allowed`."""
    key = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        return _unknown_key(key)
    message = item["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if not key:
        return message
    if item["type"] == "missing":
        return f"{key} is missing"
    return f"{key} = {item['input']!r}: {message}"


def _unknown_key(key: str) -> str:
    known = config_keys()
    section, _, leaf = key.rpartition(".")
    inside = [k.removeprefix(f"{section}.") if section else k for k in known if k.rpartition(".")[0] == section]
    elsewhere = [k for k in known if k.rpartition(".")[2] == leaf]
    close = difflib.get_close_matches(leaf, inside, n=1, cutoff=0.6)
    if close:
        guess = [f"{section}.{close[0]}" if section else close[0]]
    else:
        guess = elsewhere[:1] or difflib.get_close_matches(key, known, n=1, cutoff=0.4)
    hint = f"; did you mean {guess[0]!r}?" if guess else ";"
    place = f"keys of {section}" if section else "sections"
    return f"unknown key {key!r}{hint} {place}: {', '.join(inside)}"
