"""Pre-train the embedded model from nothing. See --help; every stage resumes where it was killed."""

from __future__ import annotations

from pathlib import Path

import torch
import typer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def vae(folder: Path = Path(".work/pico"), steps: int = 2600, threads: int = 2) -> None:
    """Stage 1: the autoencoder (about 16 minutes on 2 cores)."""
    from flowrl_img.pico.autoencoder import psnr, train_autoencoder

    torch.set_num_threads(threads)
    folder.mkdir(parents=True, exist_ok=True)
    print(f"held-out PSNR {psnr(train_autoencoder(folder, steps)):.2f} dB")


if __name__ == "__main__":
    app()
