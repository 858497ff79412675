"""Imports go down only, and nothing heavy is imported where a user would wait for it."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("kernels", "samplers", "rewards")
LEAVES = {"flowrl_img.world", "flowrl_img.plugins", "flowrl_img.resources"}
# What a room may import of this house, besides itself. Files of flowrl_img/ itself may import everything.
ALLOWED = {
    "kernels": set(),
    "samplers": {"flowrl_img.kernels"},
    "rewards": LEAVES,
    "flowrl_img/world": set(),
    "flowrl_img/objectives": {"flowrl_img.kernels", "flowrl_img.needs", "flowrl_img.types"},
}
# Third-party packages a room may import at the top of a file; elsewhere they are imported where they are used.
TOP_LEVEL = {
    "kernels": {"torch"},
    "samplers": {"torch", "numpy"},
    "rewards": {"torch", "numpy", "PIL", "rapidfuzz"},
    "flowrl_img/world": {"numpy", "PIL"},
    "flowrl_img": {"torch", "numpy", "PIL", "pydantic", "yaml", "typer", "rich"},
}
LIGHT = (
    "__init__", "cli", "commands/common", "commands/evaluate", "commands/export", "commands/rewards", "commands/sample",
    "config", "geometry", "needs", "plan", "plugins", "recipes", "resources", "tracking", "validation", "window",
)  # fmt: skip
LIGHT_PACKAGES = {"pydantic", "yaml", "typer"}
STANDARD = sys.stdlib_module_names


def modules(folder: str) -> list[Path]:
    """Python files of a room; the three links inside flowrl_img are other rooms."""
    files = sorted((ROOT / folder).rglob("*.py"))
    return [f for f in files if not (folder == "flowrl_img" and f.relative_to(ROOT / folder).parts[0] in ROOMS)]


def imports(path: Path, *, top_level: bool) -> set[str]:
    """Absolute names imported by a file: all of them, or those outside functions and TYPE_CHECKING blocks."""
    tree = ast.parse(path.read_text())
    nodes = _statements(tree) if top_level else ast.walk(tree)
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute, so that links and installs agree"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def _statements(node: ast.AST):
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from _statements(child)


def inside(name: str, packages: set[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def foreign(names: set[str]) -> set[str]:
    """The third-party packages among imported names."""
    return {name.split(".")[0] for name in names} - STANDARD - {"flowrl_img"}


@pytest.mark.parametrize("room", ALLOWED)
def test_a_room_imports_only_the_rooms_below_it(room):
    own = f"flowrl_img.{room.removeprefix('flowrl_img/')}"
    for path in modules(room):
        ours = {name for name in imports(path, top_level=False) if name.split(".")[0] == "flowrl_img"}
        strays = {name for name in ours if not inside(name, {own} | ALLOWED[room])}
        assert not strays, f"{path.relative_to(ROOT)} reaches up to {sorted(strays)}"


@pytest.mark.parametrize("leaf", ["plugins", "resources"])
def test_the_resolver_of_plugins_and_data_is_a_leaf_of_the_standard_library(leaf):
    path = ROOT / "flowrl_img" / f"{leaf}.py"
    assert foreign(imports(path, top_level=True)) == set()
    assert not {name for name in imports(path, top_level=False) if name.startswith("flowrl_img")}


@pytest.mark.parametrize("room", ALLOWED)
def test_rooms_are_imported_by_their_full_name(room):
    for path in modules(room):
        bare = {name for name in imports(path, top_level=False) if name.split(".")[0] in ROOMS}
        assert not bare, f"{path.relative_to(ROOT)}: write flowrl_img.{min(bare)}"


@pytest.mark.parametrize("room", TOP_LEVEL)
def test_heavy_packages_are_imported_where_they_are_used(room):
    for path in modules(room):
        packages = foreign(imports(path, top_level=True))
        triton_body = path.name.endswith("_triton.py")
        strays = packages - TOP_LEVEL[room] - ({"triton"} if triton_body else set())
        assert not strays, f"{path.relative_to(ROOT)} imports {sorted(strays)} at its top"


@pytest.mark.parametrize("module", LIGHT)
def test_modules_behind_the_command_line_import_light_packages_only(module):
    found = imports(ROOT / "flowrl_img" / f"{module}.py", top_level=True)
    assert foreign(found) <= LIGHT_PACKAGES
    ours = {name for name in found if name.startswith("flowrl_img.")}
    assert {name for name in ours if name.split(".")[1] not in (*LIGHT, "commands", "__version__")} == set()


def test_the_checker_sees_a_forbidden_import(tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text("import torch\nif True:\n    from flowrl_img.rewards import registry\ndef f():\n    import scipy\n")
    assert imports(bad, top_level=True) == {"torch", "flowrl_img.rewards.registry"}
    assert imports(bad, top_level=False) == {"torch", "flowrl_img.rewards.registry", "scipy"}


def test_root_folders_hold_no_init_file_and_no_tests_package():
    assert not [room for room in (*ROOMS, "assets", "scripts", "tests") if (ROOT / room / "__init__.py").exists()]
    assert all((ROOT / "flowrl_img" / room).is_symlink() for room in ROOMS)
