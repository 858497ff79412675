import numpy as np
import pytest
import torch
from drawing import pictures_of

from flowrl_img import recipes
from flowrl_img.parts import read_inputs
from flowrl_img.prompts import check_balance, choose_evenly, draw_samples, load_prompts, spread
from flowrl_img.rollout import roll
from flowrl_img.samplers.steps.flow_sde import FlowSDE
from flowrl_img.types import PromptSet, Sample

SAMPLES = [Sample(0, "0/0/0", 0), Sample(0, "0/0/0", 1), Sample(1, "0/1/1", 0), Sample(2, "0/2/2", 0)]


def drawn(trainer, samples=SAMPLES, batch=8, guidance=1.0, noise=0.7, stochastic=(0, 1, 2), shared=False):
    return roll(
        trainer.model, trainer.prompts, samples, num_steps=4, guidance=guidance, step_rule=FlowSDE(noise),
        stochastic=stochastic, seed=5, batch=batch, shared_noise=shared,
    )  # fmt: skip


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_ode_pictures_equal_the_stock_pipeline_within_one_grey_level(tiny_trainer, tiny_folder, guidance):
    from diffusers import StableDiffusion3Pipeline

    from flowrl_img import seeds

    trainer = tiny_trainer(random_lora=False)
    images = pictures_of(trainer, SAMPLES, seed=5, num_steps=5, guidance=guidance, batch=3)
    stock = StableDiffusion3Pipeline.from_pretrained(tiny_folder, text_encoder_3=None, tokenizer_3=None)
    stock.set_progress_bar_config(disable=True)
    latents = seeds.normal([seeds.key(5, "root", s.id) for s in SAMPLES], (4, 8, 8))
    expected = stock(
        [trainer.prompts.texts[s.prompt] for s in SAMPLES], num_inference_steps=5, guidance_scale=guidance,
        latents=latents, height=64, width=64, max_sequence_length=1, output_type="np",
    ).images  # fmt: skip
    ours = (images.permute(0, 2, 3, 1).numpy() * 255).round()
    assert np.abs(ours - (expected * 255).round()).max() <= 1
    assert ours.std() > 1  # not blank


def test_noise_level_zero_is_the_ode(tiny_trainer):
    trainer = tiny_trainer()
    quiet = drawn(trainer, noise=1e-9, stochastic=(0, 1, 2))
    plain = pictures_of(trainer, SAMPLES, seed=5, num_steps=4, guidance=1.0, batch=8)
    # A and B of a silent Flow-SDE step equal 1 and dt up to rounding; a grey level is 4e-3.
    torch.testing.assert_close(quiet.leaves.images, plain, rtol=0, atol=1e-5)


def test_a_sample_does_not_depend_on_its_batch_mates(tiny_trainer):
    trainer = tiny_trainer()
    together, alone = drawn(trainer, batch=4), drawn(trainer, samples=SAMPLES[2:3])
    torch.testing.assert_close(together.leaves.images[2:3], alone.leaves.images, rtol=0, atol=1e-5)
    in_threes = drawn(trainer, batch=3)
    torch.testing.assert_close(together.leaves.images, in_threes.leaves.images, rtol=0, atol=1e-5)


def test_edges_are_sorted_by_sample_and_step_and_share_states(tiny_trainer):
    edges = drawn(tiny_trainer(), batch=3).edges
    assert edges.leaf.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert edges.step.tolist() == [0, 1, 2] * 4
    assert len(edges.states) == 4 * 4  # three transitions of a path touch four states
    chain = edges.at_s.view(4, 3)[:, :-1]
    assert torch.equal(chain, edges.at_t.view(4, 3)[:, 1:])


def test_stored_states_reproduce_the_noise_that_was_added(tiny_trainer):
    from flowrl_img import seeds

    rollout = drawn(tiny_trainer())
    edges, table = rollout.edges, rollout.table
    rows = (slice(None), None, None, None)
    mean = table.A[edges.step][rows] * edges.states[edges.at_t] + table.B[edges.step][rows] * edges.v_old
    z = (edges.states[edges.at_s] - mean) / table.std[edges.step][rows]
    keys = [
        seeds.key(5, "sde", SAMPLES[k].id, i) for k, i in zip(edges.leaf.tolist(), edges.step.tolist(), strict=True)
    ]
    torch.testing.assert_close(z.float(), seeds.normal(keys, (4, 8, 8)), rtol=0, atol=1e-4)


def test_nothing_stored_carries_a_graph(tiny_trainer):
    rollout = drawn(tiny_trainer())
    tensors = [rollout.leaves.images, rollout.edges.states, rollout.edges.v_old, rollout.edges.residual]
    assert not any(t.requires_grad or t.grad_fn is not None for t in tensors)


def test_network_calls_are_counted_and_double_with_guidance(tiny_trainer):
    for guidance, passes in ((1.0, 1), (3.0, 2)):
        trainer = tiny_trainer()
        drawn(trainer, guidance=guidance)
        assert trainer.model.calls == passes * 4 * len(SAMPLES)


def test_shared_noise_gives_a_group_one_start_and_different_pictures(tiny_trainer):
    rollout = drawn(tiny_trainer(), shared=True)
    starts = rollout.edges.states[rollout.edges.at_t[rollout.edges.step == 0]]
    assert torch.equal(starts[0], starts[1])
    assert not torch.equal(starts[0], starts[2])
    assert not torch.equal(rollout.leaves.images[0], rollout.leaves.images[1])


def test_drawn_groups_are_whole_distinct_and_balanced():
    prompts = load_prompts("pico/train_geneval")
    samples = draw_samples(prompts, 12, 3, "tag", seed=1, rollout=4)
    assert len(samples) == 36
    assert len({s.id for s in samples}) == 36
    groups = {s.group: s.prompt for s in samples}
    assert len(groups) == 12
    tags = [prompts.metadata[p]["tag"] for p in groups.values()]
    assert {tags.count(t) for t in tags} == {2}  # 12 groups over 6 tasks


def test_shares_give_the_turns_of_each_task_and_repeat_no_prompt():
    prompts = load_prompts("pico/train_geneval")
    shares = {"position": 3, "counting": 2, "colors": 1}
    seen = [
        s.prompt
        for rollout in range(3)
        for s in draw_samples(prompts, 6, 2, "tag", shares, seed=1, rollout=rollout)
        if s.image == 0
    ]
    tags = [prompts.metadata[p]["tag"] for p in seen]
    assert {t: tags.count(t) for t in set(tags)} == {t: 3 * n for t, n in shares.items()}
    assert len(set(seen)) == len(seen)


def test_a_share_of_an_unknown_task_names_the_nearest():
    with pytest.raises(ValueError, match="'positon'; did you mean 'position'"):
        draw_samples(load_prompts("pico/train_geneval"), 6, 2, "tag", {"positon": 1}, seed=1, rollout=0)


def test_a_balance_key_that_no_prompt_has_is_told_and_the_default_may_be_absent():
    change = ["prompts.balance=tga"]
    with pytest.raises(ValueError, match=r"pico/train_geneval: .*no prompt has the key 'tga'; did you mean 'tag'"):
        read_inputs(recipes.load("pico", change))
    untagged = PromptSet(("a", "b"), ("a", "b"), ({}, {}))
    check_balance(untagged, "tag")
    assert len(draw_samples(untagged, 2, 1, "tag", seed=0, rollout=0)) == 2


def test_every_prompt_of_a_task_comes_before_any_comes_again():
    prompts = load_prompts("pico/train_geneval")
    single = [k for k, row in enumerate(prompts.metadata) if row["tag"] == "single_object"]
    seen = [
        s.prompt
        for rollout in range(8)
        for s in draw_samples(prompts, 6, 2, "tag", seed=1, rollout=rollout)
        if s.image == 0 and s.prompt in single
    ]
    assert sorted(seen) == single


def test_samples_are_spread_and_none_comes_twice():
    samples = choose_evenly(load_prompts("pico/test_geneval"), 6, "tag")
    assert spread(samples, 3) == samples[::2]
    assert spread(samples, 12) == samples
    assert spread(samples, 0) == ()


def test_evaluation_samples_are_equally_many_per_task():
    prompts = load_prompts("pico/test_geneval")
    samples = choose_evenly(prompts, 120, "tag")
    tags = [prompts.metadata[s.prompt]["tag"] for s in samples]
    assert {t: tags.count(t) for t in tags} == dict.fromkeys(tags, 20)
    assert len({s.id for s in samples}) == 120
