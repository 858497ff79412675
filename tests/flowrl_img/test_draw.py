import json

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from flowrl_img.draw import Ask, Request, parse_seeds, sample_sources, settings_of
from flowrl_img.scales import parse_variants
from flowrl_img.sources import find, open_subject, split_words

RING, HEARTS = "a photo of a ring", "a photo of two hearts"


def drawn(words, out, **options):
    return list(sample_sources(list(map(str, words)), Ask("pico", out=out, **options)))


def test_every_prompt_seed_and_strength_is_a_file_that_says_how_it_was_made(tiny_run, tmp_path):
    run = tiny_run(objective={"name": "flow_grpo", "clip_range": 1e-2, "kl_weight": 0.04})
    lines = drawn([run, "evaluation.steps=2"], tmp_path / "out", prompts=(RING, HEARTS), seeds="0,7", scales="0,1,1.6")
    files = sorted(p.name for p in (tmp_path / "out").iterdir())
    assert len(files) == 2 * 2 * 3 and "001-a-photo-of-two-hearts-seed7-w=1.6.png" in files
    assert lines[:-1] == [str(tmp_path / "out" / name) for name in order(files)]
    assert lines[-1] == "scale 1.6: nominal KL weight 0.04 / 1.6 = 0.025"
    found = settings_of(tmp_path / "out" / "001-a-photo-of-two-hearts-seed7-w=1.6.png")
    assert (found["prompt"], found["seed"], found["scale"]) == (HEARTS, 7, ["1.6"])
    assert (found["steps"], found["guidance"], found["tuned"]) == (2, 1.0, [f"{run}: checkpoint-000004"])


def order(files):
    """Prompt, then seed, then base, tuned, w."""
    rank = {"base": 0, "tuned": 1, "w=1.6": 2}
    return sorted(files, key=lambda n: (n[:3], n.split("-seed")[1][0], rank[n.rsplit("-", 1)[1].removesuffix(".png")]))


def test_a_seed_is_that_of_the_stock_pipeline_with_the_adapter(tiny_run, tiny_folder, tmp_path):
    from diffusers import StableDiffusion3Pipeline

    run = tiny_run()
    drawn([run, "evaluation.steps=3", "evaluation.guidance=3"], tmp_path / "out", prompts=(RING,), seeds="5")
    [file] = (tmp_path / "out").iterdir()
    pipeline = StableDiffusion3Pipeline.from_pretrained(tiny_folder, text_encoder_3=None, tokenizer_3=None)
    pipeline.load_lora_weights(run / "checkpoint-000004" / "adapter")
    expected = pipeline(
        RING, num_inference_steps=3, guidance_scale=3.0, height=64, width=64, max_sequence_length=1,
        generator=torch.Generator().manual_seed(5),
    ).images[0]  # fmt: skip
    difference = np.asarray(expected).astype(int) - np.asarray(Image.open(file)).astype(int)
    assert np.abs(difference).max() <= 1 and np.asarray(expected).std() > 1


def test_a_grid_is_one_picture_with_all_settings(tiny_run, tmp_path):
    drawn(
        [tiny_run(), "evaluation.steps=1"], tmp_path / "out", prompts=(RING,), seeds="0-2", scales="0,1", layout="grid"
    )
    [file] = (tmp_path / "out").iterdir()
    assert file.name == "grid.png"
    assert settings_of(file)["seeds"] == [0, 1, 2] and settings_of(file)["scales"] == ["base", "tuned"]


def test_the_base_alone_can_be_drawn(tiny_folder, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(f"{RING}\n{HEARTS}\n")
    words = [f"model.path={tiny_folder}", "evaluation.steps=1"]
    drawn(words, tmp_path / "out", file=str(prompts), layout="both")
    names = sorted(p.name for p in (tmp_path / "out").iterdir())
    assert names == ["000-a-photo-of-a-ring-seed0-base.png", "001-a-photo-of-two-hearts-seed0-base.png", "grid.png"]


def test_full_fine_tuning_is_sampled_as_a_second_network(tiny_run, tiny_trainer, tmp_path):
    from flowrl_img.blend import Blend, Side
    from flowrl_img.rollout import generate

    run = tiny_run(weights={"kind": "full", "ema": None})
    trainer = tiny_trainer(weights={"kind": "full", "ema": None})
    drawn([run, "evaluation.steps=2"], tmp_path / "out", prompts=(RING,), seeds="3", scales="0,1")
    for name, weight_set in (("base", "reference"), ("tuned", "current")):
        with trainer.weights.use(weight_set):
            [image] = generate(Blend(Side(trainer.model)), [RING], [3], num_steps=2, guidance=1.0, batch=1)
        shown = np.asarray(Image.open(tmp_path / "out" / f"000-a-photo-of-a-ring-seed3-{name}.png")).astype(float)
        assert np.abs(shown - (image.permute(1, 2, 0).numpy() * 255)).max() <= 1


def test_pictures_are_not_overwritten_unless_asked(tiny_folder, tmp_path):
    words = [f"model.path={tiny_folder}", "evaluation.steps=1"]
    drawn(words, tmp_path / "out", prompts=(RING,))
    with pytest.raises(FileExistsError, match=r"already holds 000-a-photo-of-a-ring-seed0-base\.png"):
        drawn(words, tmp_path / "out", prompts=(RING,))
    drawn(words, tmp_path / "out", prompts=(RING,), overwrite=True)


def test_seeds_are_numbers_and_ranges():
    assert parse_seeds("0,3,8-11,3") == (0, 3, 8, 9, 10, 11)
    for text in ("", "-1", "x", "5-3", "1.5", "0-99999999"):
        with pytest.raises(ValueError, match="is no seed: write numbers from 0"):
            parse_seeds(text)


def test_a_picture_from_elsewhere_has_no_settings(tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    with pytest.raises(ValueError, match="does not say how it was made"):
        settings_of(tmp_path / "a.png")


def test_file_names_hold_no_character_that_a_file_system_refuses():
    variants = tuple(parse_variants("1:0@0.5,1/0", 2))
    request = Request(("../a\\b: *?",), (0,), variants)
    assert request.files() == ["000-a-b-seed0-w=1_0@0.5.png", "000-a-b-seed0-w=1+0.png"]


# -- what tuned weights can be


def test_words_are_tuned_weights_or_changes(tmp_path):
    odd = tmp_path / "a=b"
    odd.mkdir()
    assert split_words(["runs/x", "run.seed=3", str(odd)]) == (["runs/x", str(odd)], ["run.seed=3"])


def test_a_run_a_checkpoint_a_lora_and_its_folder_are_one_source(tiny_run):
    run = tiny_run()
    checkpoint = run / "checkpoint-000004"
    files = {find(str(p)).file for p in (run, checkpoint, checkpoint / "adapter", checkpoint / "adapter" / NAME)}
    assert files == {checkpoint / "adapter" / NAME}
    assert find(str(run)).title == find(str(checkpoint)).title == f"{run}: checkpoint-000004"
    assert open_subject([str(checkpoint)], "pico").run == run


NAME = "pytorch_lora_weights.safetensors"


def test_a_comfyui_file_is_read_as_the_lora_it_was_made_from(tiny_run, tmp_path):
    from safetensors.torch import save_file

    from flowrl_img.export.comfyui import to_comfyui

    pairs = find(str(tiny_run())).lora.pairs
    save_file(to_comfyui(pairs), tmp_path / "comfyui.safetensors")
    back = find(str(tmp_path / "comfyui.safetensors")).lora.pairs
    assert back.keys() == pairs.keys()
    assert all(torch.equal(back[m].up, pairs[m].up) and back[m].alpha == pairs[m].alpha for m in pairs)


def test_settings_of_the_run_hold_and_can_be_changed(tiny_run, tiny_folder):
    run = tiny_run(evaluation={"steps": 7})
    assert open_subject([str(run)], "pico").config.evaluation.steps == 7
    subject = open_subject([str(run), "evaluation.steps=9"], "pico")
    assert subject.config.evaluation.steps == 9 and subject.config.model.path == str(tiny_folder)


def test_a_network_of_another_architecture_is_refused(tiny_run, tiny_folder, tmp_path):
    import shutil

    run = tiny_run(weights={"kind": "full", "ema": None})
    shutil.copytree(run / "checkpoint-000004" / "adapter" / "transformer", tmp_path / "other" / "transformer")
    file = tmp_path / "other" / "transformer" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "num_layers": 1}))
    with pytest.raises(ValueError, match="another architecture than"):
        open_subject([str(tmp_path / "other"), f"model.path={tiny_folder}"], "pico")


def test_a_network_whose_weights_are_not_those_of_its_config_is_refused_before_anything_is_loaded(
    tiny_run, tiny_folder, tmp_path
):
    import shutil

    run = tiny_run(weights={"kind": "full", "ema": None})
    folder = tmp_path / "other" / "transformer"
    shutil.copytree(run / "checkpoint-000004" / "adapter" / "transformer", folder)
    words = [str(tmp_path / "other"), f"model.path={tiny_folder}"]
    assert open_subject(words, "pico").sources
    file = folder / "diffusion_pytorch_model.safetensors"
    whole = load_file(file)
    name = "transformer_blocks.0.attn.to_q.weight"
    for change in ({"stray": whole[name]}, {name: whole[name][:8].clone()}):
        save_file({**{n: t for n, t in whole.items() if n != name}, **change}, file, metadata={"format": "pt"})
        with pytest.raises(ValueError, match=r"are not those of its config\.json: \d tensors .* such as"):
            open_subject(words, "pico")
    file.write_bytes(b"x" * 20)
    with pytest.raises(ValueError, match="is not a safetensors file"):
        open_subject(words, "pico")
    file.unlink()
    with pytest.raises(FileNotFoundError, match=r"holds no diffusion_pytorch_model\.safetensors"):
        open_subject(words, "pico")


def test_a_hub_id_is_looked_up_and_its_absence_is_one_error(monkeypatch):
    import huggingface_hub

    asked = []

    def absent(repo, file):
        asked.append((repo, file))
        raise huggingface_hub.errors.LocalEntryNotFoundError("not in the cache, and offline")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", absent)
    for name, file in (("someone/lora", NAME), ("someone/lora/v2/a.safetensors", "v2/a.safetensors")):
        with pytest.raises(
            FileNotFoundError, match=f"{file} of the hub's someone/lora cannot be had: not in the cache"
        ):
            find(name)
        assert asked.pop() == ("someone/lora", file)


def test_a_hub_id_that_is_there_is_read(tiny_run, monkeypatch):
    import huggingface_hub

    file = find(str(tiny_run())).file
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda repo, name: str(file))
    assert find("someone/lora").file == file
