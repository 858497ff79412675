"""Documentation that can go stale is compared with the code."""

import re
import runpy
import shlex
from pathlib import Path

import pytest

from flowrl_img import plugins, recipes
from flowrl_img.validation import validate
from flowrl_img.window import candidates

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
README = (ROOT / "README.md").read_text()


def code_blocks(page: Path, language: str) -> list[str]:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return [text for name, text in blocks if name == language]


def test_the_configuration_reference_is_what_the_schema_says():
    reference = runpy.run_path(str(ROOT / "scripts" / "config_reference.py"))["reference"]
    written = (ROOT / "docs" / "config.md").read_text()
    assert reference() == written, "run python scripts/config_reference.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_verbs_that_pages_name_exist(page):
    verbs = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(), flags=re.MULTILINE)) <= verbs


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_overrides_shown_on_pages_are_valid(page):
    commands = [line for block in code_blocks(page, "") for line in block.splitlines() if "flowrl-img train" in line]
    for command in commands:
        words = shlex.split(command, comments=True)
        changes = [word for word in words if "=" in word and not word.startswith(("-", "["))]
        recipes.load("pico", [change for change in changes if change != "[key=value"])


COMMAND = re.compile(r"flowrl(?:-img|_img) (sample|evaluate|export) (.*)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_options_shown_on_pages_are_those_of_the_commands(page):
    import typer.main

    from flowrl_img.cli import app

    commands = typer.main.get_command(app).commands
    for block in code_blocks(page, ""):
        for name, rest in COMMAND.findall(block):
            known = {option for parameter in commands[name].params for option in parameter.opts}
            shown = {word for word in shlex.split(rest, comments=True) if word.startswith("--")}
            assert shown <= known, (name, shown - known)


def expanded(name: str) -> list[str]:
    """`a-{b,c}` as a-b and a-c, as a shell expands it."""
    found = re.search(r"\{([^}]*)\}", name)
    if not found:
        return [name]
    return [full for word in found[1].split(",") for full in expanded(name.replace(found[0], word, 1))]


def test_every_packaged_recipe_is_in_the_readme_and_no_other():
    table = README.partition("| recipe |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `([a-z0-9{},-]+)` \|", table, re.MULTILINE)
    assert sorted(name for row in rows for name in expanded(row)) == recipes.names()


def test_the_example_recipe_loads(tmp_path):
    [text] = code_blocks(ROOT / "docs" / "recipes.md", "yaml")
    (tmp_path / "my.yaml").write_text(text)
    config = recipes.load(str(tmp_path / "my.yaml"))
    assert [reward.weight for reward in config.rewards] == [1.0, 0.1]


def test_the_windows_of_the_recipe_page_train_what_it_says():
    rows = re.findall(r"^\| `(\{.*\})` \| (.*) \|$", (ROOT / "docs" / "recipes.md").read_text(), re.MULTILINE)
    assert len(rows) > 5
    for window, _ in rows:
        validate(recipes.load("pico", ["rollout.steps=30", f"rollout.window={window}"]))
    listed = {text: recipes.load("pico", [f"rollout.window={window}"]).rollout.window for window, text in rows}
    assert candidates(listed["1, 2, 3"], 10) == (1, 2, 3)


def test_the_example_plugins_are_accepted_and_work(tmp_path, monkeypatch):
    import torch

    from flowrl_img.rewards import registry
    from flowrl_img.rewards.protocol import RewardBatch

    for block in code_blocks(ROOT / "docs" / "extending.md", "python"):
        name = re.match(r"# (\w+\.py)\n", block)
        assert name, "a code block on this page starts with its file name"
        (tmp_path / name[1]).write_text(block)
    monkeypatch.syspath_prepend(tmp_path)
    grey = torch.full((1, 4, 4, 3), 255, dtype=torch.uint8)
    reward = registry.load("my_rewards:brightness", target=0.7)
    assert reward(RewardBatch(grey, ["x"], [{}], ["0"])).values.tolist() == pytest.approx([-0.3])
    table = plugins.build("steps", {"name": "my_steps:ConstantNoise", "level": 0.2}).coefficients(
        torch.tensor([1.0, 0.5, 0])
    )
    assert table.std.tolist() == [0.2, 0.2]
    assert plugins.build("objectives", {"name": "my_objectives:PlainPolicyGradient"}).needs.velocities == {"old"}


def test_the_world_page_draws_a_scene(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    [block] = code_blocks(ROOT / "docs" / "world.md", "python")
    exec(block, {})
    assert (tmp_path / "scene.png").exists()


def test_the_readme_uses_the_sequence_length_of_the_model():
    from flowrl_img.config import ModelConfig
    from flowrl_img.pico.architecture import MAX_SEQUENCE_LENGTH

    assert f"max_sequence_length={MAX_SEQUENCE_LENGTH}," in README
    assert ModelConfig().max_sequence_length == MAX_SEQUENCE_LENGTH


def test_every_reward_has_a_row_and_a_card_with_its_cost_and_how_it_is_deceived():
    from flowrl_img.rewards import registry

    page = (ROOT / "docs" / "rewards.md").read_text()
    table, _, cards = page.partition("\n## Cards\n")
    lines = [[cell.strip() for cell in row.split("|")[1:-1]] for row in re.findall(r"^\| `.*", table, re.MULTILINE)]
    rows = {cells[0].strip("`"): cells for cells in lines}
    texts = dict(re.findall(r"^\*\*(\w+)\*\*\. (.*?)(?=\n\n|\Z)", cards, re.M | re.S))
    assert set(rows) == set(texts) == set(registry.builtins())
    for name, text in texts.items():
        assert "Cost:" in text and re.search(r"[Kk]nown\s+to", text), name
        assert len(rows[name]) == 6 and all(rows[name][:4]), name


def test_the_rewards_page_configures_what_exists(tmp_path):
    from flowrl_img.rewards import registry

    pages = code_blocks(ROOT / "docs" / "rewards.md", "yaml")
    assert len(pages) == 4
    for k, text in enumerate(pages):
        (tmp_path / f"r{k}.yaml").write_text(text)
        config = recipes.load(str(tmp_path / f"r{k}.yaml"))
        mixture = registry.load_mixture([reward.section() for reward in config.rewards], config.aggregate)
        registry.load_reported([reward.section() for reward in config.report_rewards])
        assert mixture.held_out().labels == mixture.labels


def test_commands_of_rewards_on_pages_exist():
    from typer.main import get_command

    from flowrl_img.cli import app

    known = set(get_command(app).commands["rewards"].commands)
    for page in [*PAGES, ROOT / "rewards" / "README.md"]:
        for words in re.findall(r"flowrl-img rewards ([a-z| A-Z]+)", page.read_text()):
            for word in words.split("|"):
                first = word.split()
                assert not first or first[0].isupper() or first[0] in known, (page.name, word)
