"""Pre-train the embedded model from nothing, on two CPU cores: autoencoder, latents, denoiser, polish, assembly.

Every stage resumes where it was killed; `all` runs what is missing. Work files go to `.work/pico`, the finished
pipeline to `assets/pico`.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
WORK = Path(".work/pico")
VAE_STEPS = 2600
POLISH_STEPS = 1500
POOL = 80_000
Threads = Annotated[int, typer.Option(help="CPU threads")]


def _vae(folder: Path) -> Any:
    from flowrl_img.pico.autoencoder import train_autoencoder

    return train_autoencoder(folder, VAE_STEPS)


@app.command("vae")
def vae_stage(folder: Path = WORK, threads: Threads = 2) -> None:
    """Stage 1: the autoencoder (about 16 minutes)."""
    from flowrl_img.pico.autoencoder import psnr

    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    folder.mkdir(parents=True, exist_ok=True)
    print(f"held-out PSNR {psnr(_vae(folder)):.2f} dB")


@app.command("latents")
def latents_stage(folder: Path = WORK, threads: Threads = 2, count: int = POOL) -> None:
    """Between the stages: standardise the latents, encode the pool (about 5 minutes)."""
    from flowrl_img.pico import architecture
    from flowrl_img.pico.autoencoder import encode_all, fold_standardisation, psnr

    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    vae = _vae(folder)
    probe = encode_all(vae, 0, 2048)["latents"]
    fold_standardisation(vae, probe.mean((0, 2, 3)), probe.std((0, 2, 3)))
    vae.save_pretrained(folder / "vae")
    print(f"held-out PSNR {psnr(vae):.2f} dB after folding; channel std before {probe.std((0, 2, 3)).tolist()}")
    tokenizer = architecture.tokenizer()
    pool = encode_all(vae, 0, count)
    ids = tokenizer([*pool.pop("captions"), ""], padding="max_length", truncation=True, return_tensors="pt")[
        "input_ids"
    ]
    torch.save({**pool, "tokens": ids[:-1], "empty": ids[-1:]}, folder / "latents.pt")


@app.command("denoiser")
def denoiser_stage(
    folder: Path = WORK, threads: Threads = 2, steps: int = 14_000, minutes: float | None = None, aux: float = 0.15
) -> None:
    """Stage 2: transformer and text encoders. `--minutes` stops early and leaves a checkpoint to resume from."""
    from diffusers import AutoencoderKL

    from flowrl_img.pico import architecture
    from flowrl_img.pico.captions import CaptionNoise
    from flowrl_img.pico.denoiser import Schedule, train_denoiser
    from flowrl_img.pico.heldout import held_out_scores

    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    tokenizer = architecture.tokenizer()
    vae = AutoencoderKL.from_pretrained(folder / "vae").eval()
    data = torch.load(folder / "latents.pt", weights_only=True, mmap=True) | {"tokenizer": tokenizer}
    data["noise"] = CaptionNoise(tokenizer)
    plan = replace(Schedule(), steps=steps, aux_weight=aux)
    train_denoiser(folder, data, plan, lambda net: held_out_scores(net, vae, tokenizer), minutes)


@app.command("polish")
def polish_stage(folder: Path = WORK, threads: Threads = 2, steps: int = POLISH_STEPS) -> None:
    """Stage 3: the decoder against the frozen encoder (about 9 minutes)."""
    from diffusers import AutoencoderKL

    from flowrl_img.pico.autoencoder import psnr
    from flowrl_img.pico.polish import polish_decoder

    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    vae = polish_decoder(AutoencoderKL.from_pretrained(folder / "vae"), folder, steps)
    vae.save_pretrained(folder / "vae_polished")
    print(f"held-out PSNR {psnr(vae):.2f} dB")


@app.command()
def assemble(folder: Path = WORK, out: Path = Path("assets/pico"), shift: float = 3.0) -> None:
    """Write the pipeline with the averaged weights as safetensors, and the logs beside it."""
    from diffusers import AutoencoderKL

    from flowrl_img.pico import architecture
    from flowrl_img.pico.denoiser import Denoiser, Schedule

    tokenizer = architecture.tokenizer()
    net = Denoiser(tokenizer, Schedule().aux_layer)
    net.load_state_dict(torch.load(folder / "denoiser.pt", weights_only=True)["average"])
    parts = {name: getattr(net, name) for name in ("transformer", "text_encoder", "text_encoder_2")}
    net.transformer.transformer_blocks[Schedule().aux_layer]._forward_hooks.clear()
    polished = folder / "vae_polished"
    vae = AutoencoderKL.from_pretrained(polished if polished.exists() else folder / "vae")
    architecture.assemble({**parts, "tokenizer": tokenizer, "vae": vae}, shift).save_pretrained(out)
    for name in ("vae_log.jsonl", "denoiser_log.jsonl"):
        shutil.copy(folder / name, out / name)
    size = sum(f.stat().st_size for f in out.rglob("*") if f.is_file()) / 1e6
    print(json.dumps({"folder": str(out), "megabytes": round(size, 1)}))


@app.command()
def score(
    out: Path = Path("assets/pico"), threads: Threads = 2, split: str = "test", per_task: int = 100, signs: int = 128,
    guidance: float = 1.0,
) -> None:  # fmt: skip
    """Held-out scores of the assembled pipeline: plain ODE, 20 steps, fixed seeds."""
    from diffusers import StableDiffusion3Pipeline

    from flowrl_img.pico.autoencoder import psnr
    from flowrl_img.pico.denoiser import from_pipeline
    from flowrl_img.pico.heldout import held_out_scores

    torch.set_num_threads(threads)
    pipeline = StableDiffusion3Pipeline.from_pretrained(out, text_encoder_3=None, tokenizer_3=None)
    net, vae = from_pipeline(pipeline), pipeline.vae.eval()
    options: dict[str, Any] = {"per_task": per_task, "signs": signs, "split": split, "guidance": guidance}
    found = held_out_scores(net, vae, pipeline.tokenizer, shift=pipeline.scheduler.config.shift, **options)
    print(json.dumps({**options, **found, "psnr": round(psnr(vae), 2)}, indent=1))


@app.command("all")
def everything(folder: Path = WORK, threads: Threads = 2) -> None:
    """All stages from nothing, at most 3 hours on 2 cores."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "latents.pt").exists():
        latents_stage(folder, threads)
    denoiser_stage(folder, threads)
    polish_stage(folder, threads)
    assemble(folder)


if __name__ == "__main__":
    app()
