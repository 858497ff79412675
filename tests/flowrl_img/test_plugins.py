"""Names to objects, whatever the kind."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import metadata
from types import ModuleType

import pytest

from flowrl_img import plugins


@dataclass(frozen=True)
class Limits:
    low: float = 0.0
    high: float = 1.0


@dataclass(frozen=True)
class Part:
    size: int
    pair: tuple[float, float] = (0.0, 1.0)
    limits: Limits = Limits()


class Plain:
    def __init__(self, level: float = 1.0, **rest: object) -> None:
        self.level, self.rest = level, rest


def factory(size: int) -> Part:
    return Part(size)


@pytest.fixture
def my_parts(monkeypatch: pytest.MonkeyPatch) -> str:
    module = ModuleType("my_parts")
    module.Part, module.Plain, module.factory, module.ready = Part, Plain, factory, Part(7)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_parts", module)
    return "my_parts"


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("objectives", {"flow_grpo"}),
        ("steps", {"flow_sde", "ode"}),
        ("solvers", {"euler", "dpm2", "sa"}),
        ("models", {"sd3"}),
        ("rewards", {"geneval", "jpeg", "ocr"}),
        ("detectors", {"scenes"}),
    ],
)
def test_every_built_in_says_the_name_of_its_file(kind: str, names: set[str]) -> None:
    assert names <= set(plugins.available(kind))
    assert {plugins.resolve(kind, name).name for name in names} == names


def test_a_module_that_only_helps_others_is_no_plug_in() -> None:
    assert "table" not in plugins.available("steps")
    with pytest.raises(ValueError, match=r"samplers\.steps\.table exports no step .* valid: .*flow_sde"):
        plugins.resolve("steps", "table")


def test_options_become_the_annotated_types(my_parts: str) -> None:
    section = {"name": f"{my_parts}:Part", "size": 3, "pair": [1, 2], "limits": {"high": 4}}
    assert plugins.build("steps", section) == Part(3, (1.0, 2.0), Limits(0.0, 4.0))


def test_classes_functions_and_ready_objects_are_built_by_one_rule(my_parts: str) -> None:
    assert plugins.build("steps", {"name": f"{my_parts}:factory", "size": 3}) == Part(3)
    assert plugins.build("steps", {"name": f"{my_parts}:ready"}) == Part(7)
    plain = plugins.build("steps", {"name": f"{my_parts}:Plain", "level": 2, "more": "x"})
    assert (plain.level, plain.rest) == (2.0, {"more": "x"})


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"name": "Part", "sise": 3}, r"here: unknown key 'sise'; did you mean 'size'\? valid: limits, pair, size"),
        ({"name": "Part"}, "here: missing key size"),
        ({"name": "Part", "size": "big"}, "here.size = 'big': should be a valid integer"),
        ({"name": "Part", "size": 3, "pair": [1]}, r"here.pair = \[1\]: "),
        ({"name": "Part", "size": 3, "limits": {"hih": 1}}, "here.limits: unknown key 'hih'; did you mean 'high'"),
        ({"name": "factory", "size": "big"}, "here.size = 'big'"),
        ({"name": "Plain", "level": "much"}, "here.level = 'much'"),
        ({"name": "ready", "size": 3}, "here: this object is already built and takes no keys, got size"),
        ({"name": "Prt"}, "here: 'my_parts' has no 'Prt'; did you mean 'Part'"),
        ({"name": ""}, "here: my_parts: is no path; write package.module:Object"),
    ],
)
def test_what_does_not_fit_is_told_with_its_place_and_the_nearest(my_parts: str, section: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plugins.build("steps", {**section, "name": f"{my_parts}:{section['name']}"}, where="here")


def test_a_missing_module_is_told_from_an_import_that_fails_inside(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "half_installed.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"no module 'no_such_house'; is its folder on the Python path\?"):
        plugins.resolve("steps", "no_such_house.steps:Step")
    with pytest.raises(ValueError, match=r"importing 'half_installed' failed inside it: .*a_package_that_is_not_there"):
        plugins.resolve("steps", "half_installed:Step")


RULE = """
from dataclasses import dataclass
from typing import ClassVar

from flowrl_img.samplers.steps.table import check_sigmas, sde_table

__all__ = ["LinearNoise"]


@dataclass(frozen=True)
class LinearNoise:
    name: ClassVar[str] = "linear_noise"
    noise_level: float = 0.5

    def coefficients(self, sigmas):
        sigmas = check_sigmas(sigmas)
        return sde_table(sigmas, self.noise_level * sigmas[:-1])
"""


def test_a_step_rule_is_one_file_and_nothing_else(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flowrl_img import recipes
    from flowrl_img.samplers import steps
    from flowrl_img.validation import validate

    (tmp_path / "linear_noise.py").write_text(RULE)
    monkeypatch.setattr(steps, "__path__", [*steps.__path__, str(tmp_path)])
    try:
        assert "linear_noise" in plugins.available("steps")
        config = recipes.load("pico", ["rollout.step={name: linear_noise, noise_level: 0.3}"])
        assert validate(config).trained_steps == config.rollout.window.size
        with pytest.raises(ValueError, match="linear_noise adds no noise"):
            validate(recipes.load("pico", ["rollout.step={name: linear_noise, noise_level: 0}"]))
    finally:
        sys.modules.pop(f"{steps.__name__}.linear_noise", None)


def test_an_entry_point_comes_before_the_built_in(my_parts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def entry_points(group: str) -> list[metadata.EntryPoint]:
        return [metadata.EntryPoint("ode", f"{my_parts}:Part", group)] if group == "flowrl_img.steps" else []

    monkeypatch.setattr(metadata, "entry_points", entry_points)
    assert plugins.resolve("steps", "ode") is Part
    assert plugins.resolve("detectors", "scenes").name == "scenes"
