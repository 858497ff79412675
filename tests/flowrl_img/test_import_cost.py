"""What an import or `--help` pulls in: asserted as structure, timed by `make bench`."""

import json
import subprocess
import sys

import pytest

HEAVY = {"torch", "diffusers", "transformers", "accelerate", "peft", "scipy", "rapidocr_onnxruntime", "cv2"}


def modules_after(code: str) -> set[str]:
    """Top-level modules loaded by a fresh interpreter after `code`."""
    report = "import sys, json; sys.stderr.write('\\n' + json.dumps(sorted({m.split('.')[0] for m in sys.modules})))"
    script = f"try:\n    {code}\nexcept SystemExit as stop:\n    assert not stop.code, stop.code\n{report}"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(json.loads(run.stderr.splitlines()[-1]))


def test_importing_the_package_imports_nothing_else():
    loaded = modules_after("import flowrl_img")
    assert loaded & (HEAVY | {"numpy", "PIL", "pydantic", "yaml", "typer", "rich"}) == set()


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["recipes", "--help"], ["--version"]])
def test_help_needs_no_torch_and_no_recipe(arguments):
    loaded = modules_after(f"import flowrl_img.cli as c; c.main({arguments!r})")
    assert "typer" in loaded
    assert loaded & (HEAVY | {"numpy", "yaml"}) == set()


@pytest.mark.parametrize("arguments", [["recipes", "list"], ["recipes", "show", "pico", "run.seed=3"]])
def test_looking_at_recipes_needs_no_torch(arguments):
    loaded = modules_after(f"import flowrl_img.cli as c; c.main({arguments!r})")
    assert "yaml" in loaded
    assert loaded & (HEAVY | {"numpy"}) == set()
