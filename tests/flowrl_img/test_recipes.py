import re

import pytest
import yaml

from flowrl_img import recipes
from flowrl_img.config import Config


@pytest.fixture
def recipe(tmp_path):
    """Write a recipe file and give its path."""

    def write(text: str) -> str:
        path = tmp_path / "mine.yaml"
        path.write_text(text)
        return str(path)

    return write


def message(recipe: str, *overrides: str) -> str:
    with pytest.raises(ValueError) as caught:
        recipes.load(recipe, overrides)
    return str(caught.value)


@pytest.mark.parametrize("name", recipes.names())
def test_every_packaged_recipe_loads_under_its_own_name_and_says_what_it_is(name):
    config = recipes.load(name)
    assert config.name == name
    assert len(config.description) > 20


@pytest.mark.parametrize("name", recipes.names())
def test_what_show_prints_is_a_recipe_of_the_same_configuration(name, recipe):
    config = recipes.load(name, ["run.seed=5"])
    assert recipes.load(recipe(recipes.to_yaml(config))) == config


ALGORITHMS = ("flow-grpo", "tempflow", "nft", "awm", "dgpo")
REWARDS = ("geneval", "ocr", "pickscore", "multi")


def test_every_algorithm_has_a_recipe_for_the_embedded_model_and_for_every_published_reward():
    assert {f"pico-{a}" for a in ALGORITHMS[1:]} | {"pico"} <= set(recipes.names())
    assert {f"sd35-{a}-{r}" for a in ALGORITHMS for r in REWARDS} <= set(recipes.names())


# groups x pictures, updates per rollout, steps, guidance, evaluation steps, LoRA rank, spread
PUBLISHED = {
    "sd35-flow-grpo-geneval": (48, 24, 2, 10, 4.5, 40, 32, "global"),
    "sd35-flow-grpo-ocr": (48, 24, 2, 10, 4.5, 40, 32, "global"),
    "sd35-flow-grpo-pickscore": (48, 24, 2, 10, 4.5, 40, 32, "global"),
    "sd35-tempflow-geneval": (8, 24, 2, 10, 4.5, 40, 32, "group"),
    "sd35-nft-geneval": (48, 24, 1, 10, 1.0, 40, 32, "global"),
    "sd35-nft-ocr": (48, 24, 2, 10, 1.0, 40, 32, "global"),
    "sd35-nft-multi": (48, 24, 1, 25, 1.0, 40, 32, "global"),
    "sd35-awm-geneval": (72, 24, 1, 14, 1.0, 40, 32, "global"),
    "sd35-awm-pickscore": (24, 24, 1, 14, 1.0, 40, 32, "global"),
    "sd35-dgpo-geneval": (8, 16, 1, 10, 4.5, 14, 64, "group"),
    "sd35-dgpo-pickscore": (8, 24, 1, 10, 4.5, 14, 64, "global"),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_recipes_hold_the_published_sizes(name):
    config = recipes.load(name)
    rollout = config.rollout
    assert PUBLISHED[name] == (
        rollout.groups, rollout.group_size, config.run.updates_per_rollout, rollout.steps, rollout.guidance,
        config.evaluation.steps, config.weights.lora.rank, config.advantage.scale,
    )  # fmt: skip
    assert (config.optimizer.lr, config.optimizer.weight_decay, config.optimizer.grad_clip) == (3e-4, 1e-4, 1.0)
    assert config.weights.lora.alpha == 2 * config.weights.lora.rank


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("sd35-flow-grpo-geneval", {"clip_range": 1e-4, "kl_weight": 0.04, "kl_form": "published"}),
        ("sd35-flow-grpo-pickscore", {"kl_weight": 0.01, "detach_uncond": True}),
        ("sd35-tempflow-geneval", {"clip_range": 1e-4, "kl_weight": 0.004}),
        ("sd35-tempflow-pickscore", {"kl_weight": 0.001}),
        ("sd35-nft-geneval", {"beta": 1.0, "kl_weight": 1e-4, "scale": "published"}),
        ("sd35-nft-ocr", {"beta": 0.1}),
        ("sd35-awm-geneval", {"weighting": "ghuber", "power": 0.25, "kl_weight": 1e-3, "trust_weight": 1.0}),
        ("sd35-awm-ocr", {"kl_weight": 3e-3}),
        ("sd35-awm-pickscore", {"kl_weight": 1e-4}),
        ("sd35-dgpo-geneval", {"beta_dpo": 101, "clip_range": 1e-2, "kl_weight": 0.02}),
        ("sd35-dgpo-pickscore", {"beta_dpo": 10, "clip_range": 5e-2, "kl_weight": 0.001}),
    ],
)  # fmt: skip
def test_recipes_hold_the_published_numbers_of_their_objective(name, fields):
    section = recipes.load(name).objective.section()
    assert {key: section[key] for key in fields} == fields


def test_recipes_hold_the_published_schedules_and_times():
    def decay(name, which):
        follow = getattr(recipes.load(name).weights, which)
        return follow.after, follow.decay.section()

    assert decay("sd35-nft-geneval", "old") == ("rollout", {"name": "linear", "rate": 0.001, "limit": 0.5})
    late = {"name": "delayed", "start": 75, "rate": 0.0075, "limit": 0.999}
    assert decay("sd35-nft-ocr", "old") == ("rollout", late)
    assert decay("sd35-awm-ocr", "trust") == ("rollout", {"name": "linear", "rate": 0.001, "limit": 0.3})
    assert decay("sd35-dgpo-ocr", "old") == ("update", {"name": "linear", "rate": 0.001, "limit": 0.3})
    assert recipes.load("sd35-nft-ocr").rollout.policy == "old"
    dgpo = recipes.load("sd35-dgpo-geneval")
    assert (dgpo.rollout.policy, dgpo.rollout.policy_from) == ("old", 500)
    assert dgpo.matching.times.section() == {"name": "grid", "count": 4, "high": 5}
    awm = recipes.load("sd35-awm-geneval").matching.times.section()
    assert awm == {"name": "strata", "count": 6, "low": 1, "high": 12}


def test_a_file_keeps_its_stem_as_name_and_the_defaults_elsewhere(recipe):
    config = recipes.load(recipe("rollout: {steps: 6}"))
    assert config.name == "mine"
    assert config.rollout.steps == 6
    assert config.optimizer == Config().optimizer


@pytest.mark.parametrize(
    ("override", "keys", "value"),
    [
        ("run.seed=3", ("run", "seed"), 3),
        ("rollout.step.noise_level=0.7", ("rollout", "step", "noise_level"), 0.7),
        ("optimizer.lr=3e-4", ("optimizer", "lr"), 3e-4),
        ("optimizer.lr=1E-5", ("optimizer", "lr"), 1e-5),
        ("run.minutes=null", ("run", "minutes"), None),
        ("rewards=[{name: ocr, mode: full}]", ("rewards",), [{"name": "ocr", "mode": "full"}]),
        ("model.path=a=b", ("model", "path"), "a=b"),
        ("description=", ("description",), None),
    ],
)
def test_overrides_are_dotted_keys_and_yaml_values(override, keys, value):
    assert recipes.parse_override(override) == (keys, value)


def test_overrides_reach_sections_lists_and_plugins():
    changes = ["run.seed=3", "rewards.0.weight=2", "objective.clip_range=1e-3", "rollout.window.size=2"]
    config = recipes.load("pico", changes)
    assert config.run.seed == 3
    assert config.rewards[0].weight == 2.0
    assert config.objective.section()["clip_range"] == 1e-3
    assert config.rollout.window.size == 2


def test_the_last_override_of_a_key_wins():
    assert recipes.load("pico", ["run.seed=3", "run.seed=4"]).run.seed == 4


@pytest.mark.parametrize(
    ("override", "guess"),
    [
        ("rollout.grops=3", "rollout.groups"),
        ("lr=3", "optimizer.lr"),
        ("optimiser.lr=3", "optimizer"),
        ("rollout.window.schedul=fixed", "rollout.window.schedule"),
        ("weights.ema.deacy=0.5", "weights.ema.decay"),
    ],
)
def test_an_unknown_key_names_the_nearest_valid_one(override, guess):
    text = message("pico", override)
    assert f"unknown key {override.partition('=')[0]!r}" in text or "unknown key 'optimiser'" in text
    assert f"did you mean {guess!r}?" in text


def test_an_unknown_key_in_a_file_is_an_error_too(recipe):
    assert "unknown key 'run.sede'; did you mean 'run.seed'?" in message(recipe("run: {sede: 1}"))


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optimizer.lr=-1", r"optimizer\.lr = -1: .*greater than 0"),
        ("optimizer.lr=.nan", r"optimizer\.lr = nan: .*finite"),
        ("optimizer.lr=.inf", r"optimizer\.lr = inf: .*finite"),
        ("optimizer.betas=[0.9, 1.0]", r"optimizer\.betas\.1 = 1\.0: .*less than 1"),
        ("run.seed=1.5", r"run\.seed = 1\.5: .*integer"),
        ("rollout.group_size=1", r"rollout\.group_size = 1: .*greater than 1"),
        ("model.attention=flash", r"model\.attention = 'flash': .*'auto', 'sdpa' or 'xformers'"),
        ("model.resolution=65", r"model\.resolution = 65: .*multiple of 8"),
        ("rewards=[{weight: 2}]", r"rewards\.0\.name is missing"),
        ("run={rollouts: null}", r"a run needs an end: set run\.rollouts or run\.minutes"),
        ("weights.lora=3", r"weights\.lora = 3: "),
    ],
)
def test_a_wrong_value_is_one_line_of_what_where_and_range(override, expected):
    text = message("pico", override)
    assert re.search(expected, text)
    assert len(text.splitlines()) == 1


def test_all_mistakes_are_told_at_once():
    text = message("pico", "optimizer.lr=-1", "rollout.grops=3", "run.seed=x")
    assert len(text.splitlines()) == 3


def test_an_unknown_recipe_names_the_nearest():
    assert "did you mean 'pico-ocr'?" in message("pico_ocr")


def test_a_missing_recipe_file_lists_the_packaged_ones():
    assert re.search(r"no recipe file 'my/run.yaml'.*pico", message("my/run.yaml"))


@pytest.mark.parametrize("text", ["- a list", "just words", ""])
def test_a_recipe_must_be_a_mapping(recipe, text):
    assert "a recipe is a mapping of sections" in message(recipe(text))


def test_broken_yaml_names_the_line(recipe):
    assert re.search(r"mine\.yaml is not YAML \(line 3\)", message(recipe("run:\n  seed: [1\nx: 2")))


def test_a_key_given_twice_is_an_error(recipe):
    assert "'seed' stands twice in one section (line 1)" in message(recipe("run: {seed: 1, seed: 2}"))


def test_a_recipe_cannot_build_python_objects(recipe):
    assert "is not YAML" in message(recipe("run: !!python/object/apply:os.getcwd []"))


@pytest.mark.parametrize("text", ["run.seed", "=3", "run..seed=3", "run.seed=[1"])
def test_a_malformed_override_is_an_error(text):
    with pytest.raises(ValueError, match=r"is no override|is not YAML"):
        recipes.parse_override(text)


@pytest.mark.parametrize("override", ["run.seed.x=3", "rewards.first.weight=3", "rewards.7.weight=3"])
def test_an_override_below_a_value_or_past_a_list_is_an_error(override):
    data = {"run": {"seed": 1}, "rewards": [{"name": "ocr"}]}
    with pytest.raises(ValueError, match=r"has no key|must be a position"):
        recipes.apply_override(data, *recipes.parse_override(override))


def test_every_leaf_of_the_printed_configuration_is_a_known_key():
    shown = yaml.safe_load(recipes.to_yaml(Config()))
    known = set(recipes.config_keys())
    for section, value in shown.items():
        keys = value if isinstance(value, dict) and section != "objective" else ()
        assert {section, *(f"{section}.{key}" for key in keys)} <= known
