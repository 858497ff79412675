"""Write docs/config.md from the configuration schema and the built-in plug-ins: `python scripts/config_reference.py`.

`tests/flowrl_img/test_docs.py` fails while the file differs from what this prints.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from flowrl_img import plugins
from flowrl_img.config import Config, PartConfig, RewardConfig
from flowrl_img.rewards import registry

TARGET = Path(__file__).resolve().parents[1] / "docs" / "config.md"

HEAD = """\
# Configuration reference

Written by `scripts/config_reference.py` from the schema; do not edit. A recipe is a YAML file with any of these keys;
on the command line the same keys are dotted: `rollout.window.size=3`. Unknown keys are errors.
"""

PLUGINS = """\
## Plug-ins

A part with a `name` takes the fields of the object behind it. A name is a built-in (below), an entry point or a path
`package.module:Object`; see [extending.md](extending.md).
"""


def reference() -> str:
    """The whole page."""
    blocks = [HEAD, *_sections(Config, ""), PLUGINS]
    parts = (
        ("rollout.step", "steps"),
        ("rollout.solver, evaluation.solver", "solvers"),
        ("objective", "objectives"),
        ("matching.times", "times"),
        ("weights.old.decay, weights.trust.decay", "decays"),
    )
    for title, kind in parts:
        blocks += [_plugin(title, name, plugins.resolve(kind, name)) for name in plugins.available(kind)]
    blocks.append("\n".join(["### rewards: keys of every reward", "", *_table(_rows(RewardConfig)), ""]))
    blocks += [_plugin("rewards", name, plugins.resolve("rewards", name)) for name in registry.builtins()]
    names = plugins.available("transforms")
    blocks += [_plugin("transforms of a reward", name, plugins.resolve("transforms", name)) for name in names]
    return "\n".join(blocks)


def _sections(model: type[BaseModel], prefix: str) -> Iterator[str]:
    found = {name: _section(field.annotation) for name, field in model.model_fields.items()}
    inner = [(section, f"{prefix}{name}") for name, section in found.items() if section is not None]
    rows = _rows(model, [name for name, section in found.items() if section is None])
    title = f"## {prefix.removesuffix('.')}" if prefix else "## Top level"
    doc = inspect.cleandoc(vars(model).get("__doc__") or "") if prefix else ""
    yield "\n".join([title, "", *([doc, ""] if doc else []), *_table(rows), ""])
    for section, path in inner:
        yield from _sections(section, f"{path}.")


def _rows(model: type[BaseModel], names: Sequence[str] | None = None) -> list[tuple[str, ...]]:
    """One line for each of the fields `names`, or for all but `name`."""
    chosen = [name for name in model.model_fields if name != "name"] if names is None else names
    fields = {name: model.model_fields[name] for name in chosen}
    return [
        (f"`{name}`", _type(field.annotation, field.metadata), _default(field), field.description or "")
        for name, field in fields.items()
    ]


def _section(annotation: Any) -> type[BaseModel] | None:
    """The nested section behind an annotation, `Section | None` included; plug-ins are values."""
    options = [annotation, *getattr(annotation, "__args__", ())]
    found = [o for o in options if isinstance(o, type) and issubclass(o, BaseModel) and not issubclass(o, PartConfig)]
    return found[0] if found else None


def _plugin(where: str, name: str, target: Any) -> str:
    fields = [f for f in dataclasses.fields(target) if f.init] if dataclasses.is_dataclass(target) else []
    hints = get_type_hints(target) if fields else {}
    rows = [(f"`{f.name}`", _type(hints[f.name], ()), f"`{_field_default(f)}`") for f in fields]
    table = [*_table(rows), ""] if rows else ["No fields.", ""]
    return "\n".join([f"### {where}: {name}", "", inspect.getdoc(target) or "", "", *table])


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    titles = ("key", "value", "default", "meaning")[: len(rows[0])]
    body = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in rows]
    rule = " | ".join("---" for _ in titles)
    return [f"| {line} |" for line in (" | ".join(titles), rule, *body)]


def _type(annotation: Any, metadata: Any) -> str:
    words = _words(annotation)
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    limits = [f"{sign} {getattr(m, key)}" for m in metadata for key, sign in signs.items() if hasattr(m, key)]
    steps = [f"multiple of {m.multiple_of}" for m in metadata if hasattr(m, "multiple_of")]
    return ", ".join([words, *limits, *steps])


def _words(annotation: Any) -> str:
    if annotation is type(None):
        return "null"
    if annotation is RewardConfig or annotation is PartConfig:
        return "plug-in"
    arguments = getattr(annotation, "__args__", None)
    if arguments is None:
        return getattr(annotation, "__name__", str(annotation))
    origin = str(getattr(annotation, "__origin__", ""))
    if "Literal" in origin:
        return " | ".join(f"`{a}`" for a in arguments)
    if "Mapping" in origin:
        return "mapping"
    if "tuple" in origin:
        items = [_words(a) for a in arguments if a is not Ellipsis]
        return f"list of {items[0]}" if Ellipsis in arguments else f"[{', '.join(items)}]"
    if getattr(annotation, "__metadata__", None):
        return _words(annotation.__origin__)
    return " | ".join(_words(a) for a in arguments)


def _default(field: Any) -> str:
    return "required" if field.default is PydanticUndefined else f"`{_plain(field.default)}`"


def _field_default(field: dataclasses.Field[Any]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return _plain(field.default_factory())
    return "required" if field.default is dataclasses.MISSING else _plain(field.default)


def _plain(value: Any) -> str:
    """A default as YAML would write it."""
    if value is None:
        return "null"
    if isinstance(value, PartConfig):
        return f"{{name: {value.name}}}"
    if isinstance(value, tuple):
        return f"[{', '.join(_plain(v) for v in value)}]"
    if isinstance(value, bool):
        return str(value).lower()
    if dataclasses.is_dataclass(value):
        return f"{type(value).__name__}()"
    return '""' if value == "" else str(value)


if __name__ == "__main__":
    TARGET.write_text(reference())
