"""Pre-training in miniature: stages resume to the same weights, and the fold and the target are exact."""

import dataclasses
import json

import pytest
import torch

from flowrl_img.pico import architecture
from flowrl_img.pico.autoencoder import encode_all, fold_standardisation, to_unit
from flowrl_img.pico.captions import CaptionNoise
from flowrl_img.pico.denoiser import Denoiser, Schedule, train_denoiser
from flowrl_img.pico.pool import make_pool

PLAN = dataclasses.replace(Schedule(), steps=3, last_steps=2, batch=2, guided_from=0.5)


@pytest.fixture(scope="module")
def data():
    tokenizer = architecture.tokenizer()
    pool = make_pool(0, 6)
    ids = tokenizer([*pool.captions, ""], padding="max_length", truncation=True, return_tensors="pt")["input_ids"]
    generator = torch.Generator().manual_seed(0)
    return {
        "latents": torch.randn(6, architecture.LATENT_CHANNELS, 8, 8, generator=generator),
        "cells": torch.from_numpy(pool.cells),
        "tokens": ids[:-1],
        "empty": ids[-1:],
        "tokenizer": tokenizer,
        "noise": CaptionNoise(tokenizer),
    }


def test_a_stopped_denoiser_goes_on_to_the_same_weights(data, tmp_path):
    torch.set_num_threads(1)
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    straight.mkdir()
    stopped.mkdir()
    whole = train_denoiser(straight, data, PLAN, lambda net: {})
    train_denoiser(stopped, data, PLAN, lambda net: {}, minutes=0)
    assert json.loads((stopped / "denoiser_log.jsonl").read_text().splitlines()[0])["step"] == 1
    resumed = train_denoiser(stopped, data, PLAN, lambda net: {})
    for (name, a), b in zip(whole.state_dict().items(), resumed.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def test_the_cell_head_leaves_no_trace_in_the_pipeline(data):
    net = Denoiser(data["tokenizer"], aux_layer=2)
    assert not any("head" in name for name in net.transformer.state_dict())


def test_the_text_path_is_that_of_the_stock_pipeline(data):
    net = Denoiser(data["tokenizer"], aux_layer=2).eval()
    parts = {name: getattr(net, name) for name in ("transformer", "text_encoder", "text_encoder_2")}
    pipeline = architecture.assemble({**parts, "tokenizer": data["tokenizer"], "vae": architecture.autoencoder()})
    caption = 'a sign that says "AB4"'
    ids = data["tokenizer"](caption, padding="max_length", truncation=True, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        context, pooled = net.encode(ids)
        stock, _, stock_pooled, _ = pipeline.encode_prompt(
            caption, None, None, do_classifier_free_guidance=False, max_sequence_length=architecture.MAX_SEQUENCE_LENGTH
        )
    torch.testing.assert_close(context, stock, rtol=0, atol=1e-6)
    torch.testing.assert_close(pooled, stock_pooled, rtol=0, atol=1e-6)


def test_folding_standardises_latents_and_keeps_pictures():
    torch.manual_seed(0)
    vae = architecture.autoencoder().eval()
    x = to_unit(make_pool(0, 4).images)
    with torch.no_grad():
        posterior = vae.encode(x).latent_dist
        before, spread = vae.decode(posterior.mean).sample, posterior.std
        mean, std = posterior.mean.mean((0, 2, 3)), posterior.mean.std((0, 2, 3))
        fold_standardisation(vae, mean, std)
        folded = vae.encode(x).latent_dist
        after = vae.decode(folded.mean).sample
    torch.testing.assert_close(after, before, rtol=0, atol=1e-4)
    torch.testing.assert_close(folded.std, spread / std[None, :, None, None], rtol=1e-3, atol=1e-5)
    assert folded.mean.mean((0, 2, 3)).abs().max() < 1e-3
    torch.testing.assert_close(folded.mean.std((0, 2, 3)), torch.ones(architecture.LATENT_CHANNELS), rtol=0, atol=1e-3)


def test_encoding_in_chunks_equals_encoding_at_once():
    torch.manual_seed(0)
    vae = architecture.autoencoder().eval()
    whole, parts = encode_all(vae, 3, 5, chunk=5), encode_all(vae, 3, 5, chunk=2)
    torch.testing.assert_close(whole["latents"], parts["latents"], rtol=0, atol=1e-5)
    assert whole["captions"] == parts["captions"]


def test_the_schedule_warms_up_holds_and_cools_to_zero():
    plan = Schedule(steps=1000, warmup=100, cooldown=0.2)
    assert plan.lr_at(0) == pytest.approx(plan.lr / 100)
    assert plan.lr_at(500) == plan.lr
    assert plan.lr_at(900) == pytest.approx(plan.lr / 2)
    assert plan.lr_at(999) < plan.lr / 100


def test_a_guidance_weight_of_one_is_refused():
    with pytest.raises(ValueError, match="diverges"):
        Schedule(guided_weight=1.0)
