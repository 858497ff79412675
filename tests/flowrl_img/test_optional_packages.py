"""Each optional package gone in turn: the package imports, other rewards score, and the one that needs it says so."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# For each package: what asks for it, and what the error must name. Blocking works because nothing imported it before.
CODE = """
import os, sys
import torch
import flowrl_img.rewards.server, flowrl_img.rewards.transport
from flowrl_img.rewards import known_answers, registry
from flowrl_img.rewards.pretrained import WeightsError
from flowrl_img.rewards.score import Scorer

ASKED = {asked!r}

class Absent:
    def __init__(self, name, error):
        self.name, self.error = name, error

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == self.name:
            raise self.error(f"blocked {{name}}")

def asked_for(what):
    if what == "serve":
        scorer = Scorer(registry.load("jpeg"))
        flowrl_img.rewards.server.serve({{"jpeg": scorer}}, "127.0.0.1", 9, None)
    else:
        name, options = what
        registry.load(name, **options).validate(["a"], [{{"source": "x"}}])
        known_answers.check(registry.load(name, **options))

def child(package, what, error):
    sys.meta_path.insert(0, Absent(package, error))
    assert not [name for name in sys.modules if name.split(".")[0] == package], package
    names = registry.builtins()
    assert {{"jpeg", "geneval", "remote", "pickscore", "unifiedreward"}} <= set(names)
    known_answers.check(registry.load("jpeg"))
    try:
        asked_for(what)
    except WeightsError as error:
        return str(error)
    raise AssertionError(f"{{package}} was not missed")

for package, what, error in ASKED:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            said = child(package, what, ModuleNotFoundError if error == "gone" else RuntimeError)
        except BaseException as problem:
            said = f"PROBLEM {{type(problem).__name__}}: {{problem}}"
        os.write(write, said[:2000].encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as stream:
        print(package, error, stream.read().replace(chr(10), " "), sep="\\t")
    os.waitpid(pid, 0)
"""

HTTP = {"url": "http://127.0.0.1:9", "model": "m"}
CASES = {
    ("open_clip", "gone"): (("hpsv2", {"version": "v2.1"}), "flowrl-img[openclip]"),
    ("open_clip", "broken"): (("hpsv2", {"version": "v2.1"}), "flowrl-img[openclip]"),
    ("hpsv2", "gone"): (("hpsv2", {"version": "v2.1", "backend": "hpsv2"}), "flowrl-img[hpsv2]"),
    ("httpx", "gone"): (("remote", {"reward": "jpeg", "url": HTTP["url"]}), "flowrl-img[remote]"),
    ("uvicorn", "gone"): ("serve", "flowrl-img[serve]"),
    ("fastapi", "gone"): ("serve", "flowrl-img[serve]"),
    ("hpsv3", "gone"): (("hpsv3", {"checkpoint": __file__}), "flowrl-img rewards env hpsv3"),
    ("rapidocr_onnxruntime", "gone"): (("ocr", {}), "pip install rapidocr-onnxruntime"),
    ("transformers", "broken"): (("deqa", {"model": str(ROOT), "trust_remote_code": True}), "transformers 4.36"),
}


@pytest.fixture(scope="module")
def said():
    asked = [(package, what, error) for (package, error), (what, _) in CASES.items()]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    code = CODE.format(asked=asked).replace('validate(["a"]', "validate(['\"A\"']")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    return {(package, error): text for package, error, text in rows}


@pytest.mark.parametrize(("package", "error"), CASES)
def test_asking_for_it_names_what_to_install_and_nothing_else_minds(said, package, error):
    text = said[package, error]
    assert not text.startswith("PROBLEM"), text
    assert CASES[package, error][1] in text and "blocked" in text


def test_a_broken_torchvision_is_named_where_transformers_fails_on_it(monkeypatch):
    from flowrl_img.rewards.pretrained import WeightsError, transformers_class

    class Lazy:
        def __getattr__(self, name):
            if name.startswith("__"):
                raise AttributeError(name)
            raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setitem(sys.modules, "transformers", Lazy())
    with pytest.raises(WeightsError, match=r"pickscore: transformers\.CLIPModel .*torchvision::nms.* of one release"):
        transformers_class("pickscore", "CLIPModel")
