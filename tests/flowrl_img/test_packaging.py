"""The wheel, installed outside the tree, holds every module and every data file, and finds them."""

import json
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = PROJECT["tool"]["setuptools"]["packages"]
FOLDERS = PROJECT["tool"]["setuptools"]["package-dir"]
DATA = ("recipes/*.yaml", "prompts/**/*.jsonl", "pico/**/*", "judges/**/*", "reward_template/*.*")
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "flowrl_img", "kernels", "samplers", "rewards", "assets")

CHECK = """
import json, sys
from pathlib import Path
import flowrl_img
from flowrl_img import recipes, resources
from flowrl_img.world import load_split

files = [path for path in sorted(resources.assets().rglob("*")) if path.is_file()]
sizes = {path.relative_to(resources.assets()).as_posix(): len(path.read_bytes()) for path in files}
shown = {name: recipes.load(name).name for name in recipes.names()}
prompts = [json.loads(line) for line in resources.asset("prompts/pico/test_geneval.jsonl").read_text().splitlines()]
assert prompts == load_split("test", "geneval")
print(json.dumps({"at": str(Path(flowrl_img.__file__).parent), "sizes": sizes, "recipes": shown}))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, so that neither old build folders nor this checkout's metadata get in."""
    source = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        place = ROOT / name
        if place.is_dir():
            shutil.copytree(place, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(place, source / name)
    out = tmp_path_factory.mktemp("wheel")
    _run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", out, source)
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("site")
    _run(sys.executable, "-m", "pip", "install", "--no-deps", "-q", "--no-compile", "--target", target, wheel)
    return target


def _run(*command, **options) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _elsewhere(installed: Path, tmp_path: Path, *command: str) -> str:
    """Run outside the tree with the installed copy first on the path, as an installed package would be."""
    environment = {"PYTHONPATH": str(installed), "PATH": str(Path(sys.executable).parent), "HOME": str(tmp_path)}
    return _run(sys.executable, *command, cwd=tmp_path, env=environment)


def data_files() -> set[str]:
    found = {path for pattern in DATA for path in (ROOT / "assets").glob(pattern) if path.is_file()}
    return {path.relative_to(ROOT / "assets").as_posix() for path in found}


def module_files() -> set[str]:
    """Every Python file of the house, by its path inside the package."""
    own = [p for p in (ROOT / "flowrl_img").rglob("*.py") if p.relative_to(ROOT / "flowrl_img").parts[0] not in FOLDERS]
    names = {f"flowrl_img/{p.relative_to(ROOT / 'flowrl_img').as_posix()}" for p in own}
    rooms = [ROOT / room for room in ("kernels", "samplers", "rewards")]
    return names | {f"flowrl_img/{p.relative_to(ROOT).as_posix()}" for room in rooms for p in room.rglob("*.py")}


def test_every_folder_with_modules_is_declared_as_a_package():
    folders = {Path(file).parent.as_posix().replace("/", ".") for file in module_files()}
    assert set(PACKAGES) == folders | {"flowrl_img.assets"}


def test_the_wheel_holds_exactly_the_modules_and_the_data(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == module_files() | {f"flowrl_img/assets/{file}" for file in data_files()} | {"flowrl_img/py.typed"}


def test_the_wheel_carries_licence_version_and_command(wheel):
    archive = zipfile.ZipFile(wheel)
    from flowrl_img import __version__

    info = f"flowrl_img-{__version__}.dist-info"
    assert "Apache License" in archive.read(f"{info}/licenses/LICENSE").decode()
    assert "flowrl-img = flowrl_img.cli:main" in archive.read(f"{info}/entry_points.txt").decode()


def test_an_installed_copy_opens_every_data_file_and_recipe(installed, tmp_path):
    seen = json.loads(_elsewhere(installed, tmp_path, "-c", CHECK))
    assert Path(seen["at"]) == installed / "flowrl_img"
    assert seen["sizes"] == {file: (ROOT / "assets" / file).stat().st_size for file in data_files()}
    assert seen["recipes"] == {path.stem: path.stem for path in (ROOT / "assets/recipes").glob("*.yaml")}


def test_an_installed_copy_shows_its_help_and_plans_a_run(installed, tmp_path):
    assert "train" in _elsewhere(installed, tmp_path, "-m", "flowrl_img", "--help")
    assert "288 pictures" in _elsewhere(installed, tmp_path, "-m", "flowrl_img", "train", "--dry-run")


def test_data_that_is_missing_is_named():
    from flowrl_img.resources import asset

    with pytest.raises(FileNotFoundError, match=r"recipes/none\.yaml"):
        asset("recipes/none.yaml")


def test_extras_and_constraints_agree_with_the_ranges():
    from packaging.requirements import Requirement

    lines = (ROOT / "constraints.txt").read_text().splitlines()
    tested = dict(line.split("==") for line in lines if "==" in line)
    project = PROJECT["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    for requirement in map(Requirement, wanted):
        version = tested[requirement.name.lower().replace("_", "-")]
        assert requirement.specifier.contains(version), requirement
