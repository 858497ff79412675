"""A tiny Stable Diffusion 3 pipeline of random weights, from the real classes, on disk; and a trainer on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl_img.config import Config

FEW = [
    {"prompt": "a photo of a red circle", "tag": "colors"},
    {"prompt": "a photo of a ring", "tag": "single_object"},
    {"prompt": "a photo of a blue star", "tag": "colors"},
    {"prompt": "a photo of two hearts", "tag": "counting"},
]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Latents 4 x 8 x 8, pictures 64 x 64, transformer of 2 layers and width 32 whose output is not zero."""
    from diffusers import AutoencoderKL, SD3Transformer2DModel
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    from flowrl_img.pico import architecture

    torch.manual_seed(0)
    tokenizer = architecture.tokenizer()

    def encoder() -> Any:
        return CLIPTextModelWithProjection(
            CLIPTextConfig(
                vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, projection_dim=16, num_hidden_layers=2,
                num_attention_heads=2, max_position_embeddings=architecture.TOKENS,
                eos_token_id=tokenizer.eos_token_id, bos_token_id=tokenizer.bos_token_id,
            )
        )  # fmt: skip

    transformer = SD3Transformer2DModel(
        sample_size=8, patch_size=1, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, caption_projection_dim=32, pooled_projection_dim=32,
        pos_embed_max_size=8, qk_norm="rms_norm",
    )  # fmt: skip
    torch.nn.init.normal_(transformer.proj_out.weight, std=0.3)
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8, 8, 8, 8), latent_channels=4, norm_num_groups=4, sample_size=64, scaling_factor=1.5,
        shift_factor=0.06, mid_block_add_attention=False,
    )  # fmt: skip
    parts = {"transformer": transformer, "vae": vae, "text_encoder": encoder(), "text_encoder_2": encoder()}
    folder = tmp_path_factory.mktemp("tiny") / "sd3"
    architecture.assemble({**parts, "tokenizer": tokenizer}).save_pretrained(folder)
    return folder


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    import json

    path = tmp_path / "few.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in FEW))
    return path


@pytest.fixture
def tiny_config(tiny_folder: Path, prompt_file: Path, tmp_path: Path) -> Any:
    """tiny_config(**sections): a small run; each section is merged over the small defaults."""

    def make(**sections: Any) -> Config:
        base: dict[str, dict[str, Any]] = {
            "model": {"path": str(tiny_folder)},
            "weights": {"lora": {"rank": 4, "alpha": 8}},
            "prompts": {"train": str(prompt_file), "evaluation": str(prompt_file), "balance": None},
            "rollout": {"groups": 2, "group_size": 4, "steps": 4, "batch": 8},
            "objective": {"name": "flow_grpo", "clip_range": 1e-2},
            "optimizer": {"lr": 1e-3},
            "evaluation": {"pictures": 4, "steps": 2, "sheet": 2},
            "run": {"rollouts": 2, "updates_per_rollout": 2, "micro_batch": 6, "folder": str(tmp_path / "run")},
        }
        if sections.get("weights", {}).get("kind") == "full":
            base["weights"] = {}
        for name, section in sections.items():
            if name in ("rewards", "aggregate"):
                continue
            keeps = name != "objective" or section.get("name", "flow_grpo") == "flow_grpo"
            base[name] = {**(base.get(name, {}) if keeps else {}), **section}
        rewards = sections.get("rewards", [{"name": "jpeg"}])
        aggregate = sections.get("aggregate", "sum")
        return Config.model_validate({**base, "rewards": rewards, "aggregate": aggregate})

    return make


@pytest.fixture
def tiny_trainer(tiny_config: Any) -> Any:
    """tiny_trainer(random_lora=..., **sections): a Trainer on the tiny model, with a random adapter unless told."""
    from flowrl_img.loading import load_model, load_weights
    from flowrl_img.parallel import Processes
    from flowrl_img.parts import assemble
    from flowrl_img.trainer import Trainer

    def make(random_lora: bool = True, **sections: Any) -> Trainer:
        config = tiny_config(**sections)
        parts = assemble(config)
        model = load_model(config, torch.device("cpu"))
        weights = load_weights(config, model, parts.objective.needs)
        if random_lora:
            shake(weights)
        return Trainer(config, parts, model, weights, Processes())

    return make


@pytest.fixture
def tiny_run(tiny_config: Any, tiny_trainer: Any) -> Any:
    """tiny_run(**sections): a run folder whose checkpoint holds random tuned weights, without any training."""
    import json

    from flowrl_img import recipes
    from flowrl_img.checkpoint import save_checkpoint

    def make(**sections: Any) -> Path:
        config = tiny_config(**sections)
        trainer = tiny_trainer(**sections)
        if "ema" in trainer.weights.sets:
            trainer.weights.remember("ema")
        trainer.update = 4
        folder = Path(config.run.folder)
        save_checkpoint(folder, trainer)
        (folder / "config.yaml").write_text(recipes.to_yaml(config))
        rows = [{"update": k, "reward": 0.1 * k} for k in range(1, 5)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return folder

    return make


def shake(weights: Any, seed: int = 0, scale: float = 0.05) -> None:
    """Move every trained weight by a seeded random amount, and the sets that follow along."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in weights.trainable.values():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    for name in weights.decays:
        weights.remember(name)
