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


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["train", "--help"],
        ["sample", "--help"],
        ["recipes", "--help"],
        ["rewards", "--help"],
        ["--version"],
    ],
)
def test_help_needs_no_torch_and_no_recipe(arguments):
    loaded = modules_after(f"import flowrl_img.cli as c; c.main({arguments!r})")
    assert "typer" in loaded
    assert loaded & (HEAVY | {"numpy", "yaml"}) == set()


@pytest.mark.parametrize("arguments", [["recipes", "list"], ["recipes", "show", "pico", "run.seed=3"]])
def test_looking_at_recipes_needs_no_torch(arguments):
    loaded = modules_after(f"import flowrl_img.cli as c; c.main({arguments!r})")
    assert "yaml" in loaded
    assert loaded & (HEAVY | {"numpy"}) == set()


WITHOUT_EXTRAS = """
import importlib, pkgutil, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in {blocked!r}:
            raise ModuleNotFoundError(f'No module named {{name!r}}', name=name)

sys.meta_path.insert(0, Absent())
import flowrl_img
names = [m.name for m in pkgutil.walk_packages(flowrl_img.__path__, 'flowrl_img.')]
names += [m.name for room in ('kernels', 'samplers', 'rewards')
          for m in pkgutil.walk_packages([flowrl_img.__path__[0] + '/' + room], f'flowrl_img.{{room}}.')]
wanted = [n for n in names if not n.endswith(('__main__', '_triton'))]
for name in wanted:
    importlib.import_module(name)
from flowrl_img.rewards import registry
print(len(wanted), *registry.builtins())
"""


def test_everything_imports_without_any_extra():
    blocked = {"triton", "xformers", "open_clip", "hpsv2", "tensorboard", "wandb", "diffusers", "transformers", "peft"}
    code = WITHOUT_EXTRAS.format(blocked=sorted(blocked))
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    count, *rewards = run.stdout.split()
    assert int(count) > 30
    assert {"geneval", "jpeg", "ocr"} <= set(rewards)
