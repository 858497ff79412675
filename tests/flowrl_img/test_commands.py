"""Wrong inputs of sample, evaluate and export: one clear error each, exit code 2, before a model is loaded."""

import json

import pytest
import torch
from safetensors.torch import save_file

from flowrl_img import cli, recipes


@pytest.fixture
def call(capsys, monkeypatch, tmp_path):
    """Run the command line in an empty folder where no model can be loaded; gives (exit code, stdout, stderr)."""
    from flowrl_img import sources
    from flowrl_img.export import run as export_run

    def never(config, device):
        raise AssertionError("a model was loaded")

    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        capsys.readouterr()
        with monkeypatch.context() as patch, pytest.raises(SystemExit) as stop:
            patch.setattr(sources, "load_model", never)
            patch.setattr(export_run, "load_model", never)
            cli.main(list(map(str, arguments)))
        shown = capsys.readouterr()
        return stop.value.code or 0, shown.out, shown.err

    return call


@pytest.fixture
def written(tiny_config, tmp_path):
    """written(**sections): a run folder whose adapter fits the tiny base, written by hand."""

    def make(**sections):
        config = tiny_config(**sections)
        folder = tmp_path / "run"
        adapter = folder / "checkpoint-000004" / "adapter"
        adapter.mkdir(parents=True)
        (folder / "config.yaml").write_text(recipes.to_yaml(config))
        (adapter.parent / "manifest.json").write_text("{}")
        stem = "transformer.transformer_blocks.0.attn.to_q"
        tensors = {f"{stem}.lora_A.weight": torch.zeros(4, 32), f"{stem}.lora_B.weight": torch.zeros(32, 4)}
        save_file(tensors, adapter / "pytorch_lora_weights.safetensors")
        return folder

    return make


def refused(answer, message):
    code, _, err = answer
    assert code == 2 and message in err, err
    assert all(line.startswith("error: ") for line in err.splitlines())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--scales", "strong"], "'strong' is no scale: write a number (1.6)"),
        (["--scales", "nan"], "'nan' is no scale"),
        (["--scales", "1:0@2.5"], "share (0.0 to 1.0), got 2.5"),
        (["--scales", "1/2"], "'1/2' gives 2 scales for 1 tuned models"),
        (["--scales", ","], "no scale in ','"),
        (["model.path=./nowhere"], "no folder './nowhere'"),
        (["model.path=elsewhere"], "no folder 'elsewhere', and it is no hub id"),
        (["evaluation.stpes=3"], "did you mean 'evaluation.steps'?"),
    ],
)
@pytest.mark.parametrize("command", [["sample", "--prompt", "a ring"], ["evaluate"]], ids=["sample", "evaluate"])
def test_wrong_scales_bases_and_changes(call, written, command, options, message):
    refused(call(*command, written(), *options), message)


@pytest.mark.parametrize("command", ["sample", "evaluate"])
def test_tuned_weights_that_are_not_there_or_of_another_base(call, command, tmp_path, tiny_folder):
    more = ["--prompt", "a ring"] if command == "sample" else []
    refused(call(command, "./nowhere", *more), "no tuned weights at './nowhere': give a run folder")
    (tmp_path / "empty").mkdir()
    refused(call(command, "empty", *more), "empty holds no tuned weights: give a run folder")
    stem = "transformer.transformer_blocks.0.attn.to_q"
    wide = {f"{stem}.lora_A.weight": torch.zeros(4, 1536), f"{stem}.lora_B.weight": torch.zeros(1536, 4)}
    save_file(wide, tmp_path / "wide.safetensors")
    answer = call(command, "wide.safetensors", f"model.path={tiny_folder}", *more)
    refused(
        answer, "to_q maps 32 to 32 there, 1536 to 1536 in the file; give the base it was made for with model.path=..."
    )
    torch.save(wide, tmp_path / "pickle.safetensors")
    refused(call(command, "pickle.safetensors", *more), "is not a safetensors file")


@pytest.mark.parametrize("command", ["sample", "evaluate"])
def test_an_empty_or_missing_prompt_file(call, command, written, tmp_path):
    (tmp_path / "empty.txt").write_text("\n \n")
    run = written()
    refused(call(command, run, "--prompts", "empty.txt"), "empty.txt holds no prompts")
    refused(call(command, run, "--prompts", "none.txt"), "no prompt file 'none.txt'")


@pytest.mark.parametrize("command", [["sample", "--prompt", "a ring"], ["evaluate"], ["export"]], ids=lambda c: c[0])
def test_a_folder_that_cannot_be_written_to(call, command, written, tmp_path):
    (tmp_path / "file").write_text("")
    refused(call(*command, written(), "--out", "file/out"), "cannot write to file/")


def test_rewards_that_are_unknown_or_cannot_score_the_prompts(call, written, tmp_path):
    run = written()
    refused(
        call("evaluate", run, "--reward", "genevall"),
        "--reward: no reward is called 'genevall'; did you mean 'geneval'?",
    )
    refused(
        call("evaluate", run, "rewards=[{name: genevall}]"), "no reward is called 'genevall'; did you mean 'geneval'?"
    )
    (tmp_path / "plain.txt").write_text("a photo of a ring\n")
    refused(
        call("evaluate", run, "--prompts", "plain.txt", "--reward", "geneval"), "prompt file plain.txt: line 1: reward"
    )


def test_sample_without_a_prompt_with_wrong_seeds_or_layout(call, written):
    run = written()
    refused(call("sample", run), "no prompt: give --prompt TEXT or --prompts FILE")
    refused(call("sample", run, "--prompt", " "), "no empty text")
    refused(call("sample", run, "--prompt", "a", "--seeds", "one"), "'one' is no seed")
    refused(call("sample", run, "--prompt", "a", "--layout", "gird"), "layout 'gird' is none of single, grid, both")
    refused(call("sample", "--prompt", "a", "--scales", "1.6"), "nothing tuned is given")
    refused(call("sample", "--prompt", "a", "--recipe", "pcio"), "unknown recipe 'pcio'; did you mean 'pico'?")


def test_export_of_what_is_no_run_or_does_not_have_the_format(call, written, tmp_path):
    refused(call("export", "nowhere"), "nowhere is no run folder: it holds no config.yaml")
    run = written()
    refused(call("export", run, "--format", "lore"), "--format 'lore': did you mean 'lora'?")
    refused(call("export", run, "--weights", "emma"), "--weights 'emma': did you mean 'ema'?")
    refused(call("export", run, "--dtype", "fp8"), "--dtype 'fp8': did you mean 'fp")
    (run / "export").mkdir()
    refused(call("export", run), "is there already: give another folder with --out, or --overwrite")
    for manifest in run.glob("checkpoint-*/manifest.json"):
        manifest.unlink()
    refused(call("export", run, "--out", "x"), "no complete checkpoint")


def test_export_of_a_module_that_comfyui_has_no_name_for(call, written):
    run = written()
    stem = "transformer.transformer_blocks.0.norm1_context.linear"
    tensors = {f"{stem}.lora_A.weight": torch.zeros(4, 32), f"{stem}.lora_B.weight": torch.zeros(192, 4)}
    save_file(tensors, run / "checkpoint-000004" / "adapter" / "pytorch_lora_weights.safetensors")
    refused(call("export", run, "--format", "comfyui"), "no ComfyUI name for the adapter of")


def test_export_of_full_weights_has_no_lora_and_of_a_run_without_average_no_ema(call, written):
    run = written(weights={"kind": "full", "ema": None})
    refused(
        call("export", run, "--format", "lora"), "this run trained all weights, so it has no LoRA; use --format merged"
    )
    refused(call("export", run, "--weights", "ema"), "this run kept no average (weights.ema is null)")


def test_help_of_every_command_names_its_options(call):
    for command, option in (("sample", "--seeds"), ("evaluate", "--scales"), ("export", "--no-verify")):
        code, out, _ = call(command, "--help")
        assert code == 0 and option in out


def test_a_failed_verification_ends_with_code_1_and_leaves_the_files_for_inspection(capsys, monkeypatch, tiny_run):
    from flowrl_img.export import run as export_run
    from flowrl_img.export.verify import Check

    monkeypatch.setattr(export_run, "verify", lambda *_: [Check("lora", 0, 0.0, 0, "it loads but changes nothing")])
    run = tiny_run()
    with pytest.raises(SystemExit) as stop:
        cli.main(["export", str(run)])
    err = capsys.readouterr().err
    assert stop.value.code == 1
    assert (
        "error: lora: it loads but changes nothing" in err
        and f"error: what was written is in {run}/.export.part" in err
    )
    assert not (run / "export").exists() and (run / ".export.part" / "pytorch_lora_weights.safetensors").exists()
    assert json.loads((run / "checkpoint-000004" / "manifest.json").read_text())["update"] == 4
