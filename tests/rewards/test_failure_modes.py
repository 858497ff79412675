"""How rewards fail in training code, one row a way, and the tests that hold the guard against it.

The table is checked against the tests that exist; the ways that no other file covers are tested at the end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from torch import nn

from flowrl_img.evaluate import Evaluation
from flowrl_img.rewards import registry
from flowrl_img.rewards.score import score
from flowrl_img.types import Sample
from flowrl_img.world import render, scene_for

TESTS = Path(__file__).parents[1]
GUARDS: dict[str, tuple[str, ...]] = {
    "pictures in another range": ("test_another_range_is_an_error_that_names_the_range",),
    "rounding in low precision": ("test_bfloat16_pictures_are_rounded_in_float32",),
    "truncation in place of rounding": (
        "test_levels_are_rounded_and_channels_come_last", "test_every_level_survives_the_round_trip"
    ),
    "a picture with NaN": (
        "test_a_broken_picture_is_invalid_and_never_reaches_the_scorer", "test_a_broken_picture_is_no_mate"
    ),
    "NaN or None poisons its group": (
        "test_invalid_rewards_change_nothing_and_get_zero", "test_groups_with_fewer_than_two_valid_rewards_are_skipped",
        "test_a_masked_failure_is_left_out_until_the_budget_is_gone",
    ),
    "a failure that looks like 0": (
        "test_a_failed_score_is_invalid_and_never_zero", "test_a_crash_of_the_engine_is_invalid_and_not_zero",
        "test_a_lasting_fault_is_invalid_with_address_and_reason_and_never_zero",
        "test_a_lasting_fault_is_invalid_with_the_address_and_never_a_number",
        "test_failures_within_the_budget_are_left_out_and_more_stop_the_run",
    ),
    "one sample or one blip stops or stalls the run": (
        "test_a_picture_that_a_scorer_dies_of_fails_alone", "test_one_failed_request_does_not_touch_the_others",
        "test_a_slow_server_is_given_up_at_the_deadline", "test_a_circuit_opens_probes_and_closes",
        "test_a_dead_server_is_told_at_the_start_within_seconds_with_its_address",
        "test_a_run_goes_on_after_its_server_was_gone_for_three_seconds",
    ),
    "200 OK without a use": (
        "test_a_server_that_only_answers_politely_is_found_out_at_the_start",
        "test_one_score_for_all_examples_is_refused", "test_three_constant_rollouts_in_a_row_ring_once",
    ),
    "scores of other pictures or prompts": (
        "test_pairs_score_as_pairs_whatever_the_batch", "test_a_table_of_all_pictures_and_prompts_is_an_error",
        "test_rows_in_another_order_are_joined_by_id", "test_values_follow_a_permutation",
        "test_many_clients_at_once_lose_and_mix_up_nothing", "test_a_pair_is_scored_with_its_own_prompt",
        "test_hpsv3_is_the_mean_whatever_the_order_of_arguments",
    ),
    "sentinels in an average": ("test_a_task_that_a_prompt_is_not_of_leaves_no_number_behind",),
    "red and blue exchanged": (
        "test_the_engine_gets_an_enlarged_picture_in_blue_green_red_order", "test_red_and_blue_are_not_exchanged"
    ),
    "prompts longer than a model reads": (
        "test_long_prompts_are_counted_and_told_once", "test_prompts_are_read_to_35_tokens"
    ),
    "a prompt that is not what the reward thinks": (
        "test_the_text_read_is_compared_with_the_quoted_target", "test_targets_are_the_quoted_texts",
        "test_a_prompt_without_a_text_is_refused_when_prompts_are_loaded",
    ),
    "JPEG on the way": (
        "test_a_batch_arrives_as_it_was_sent", "test_unifiedreward_sends_one_png_and_the_task_and_divides_by_five"
    ),
    "a reward that is deceived": (
        "test_a_mean_far_outside_the_first_rollouts_rings_once",
        "test_a_reward_that_is_only_reported_may_fail_for_good",
        "test_a_picture_full_of_letters_earns_nothing_by_default",
    ),
    "a network in training mode": ("test_every_network_is_in_eval_mode_and_frozen",),
    "an embedding of zeros": ("test_an_embedding_without_a_direction_is_invalid_not_0",),
    "a client of another event loop": ("test_a_client_used_from_several_event_loops_and_threads_still_works",),
    "a library that has changed": (
        "test_a_fingerprint_holds_revision_hash_and_versions", "test_what_the_scores_depend_on_is_stated_as_text",
        "test_pickscore_is_clips_own_logit_over_26_whatever_the_padding", "test_the_wrong_activation_is_refused",
        "test_the_antialias_knob_reaches_the_pictures_and_the_record",
        "test_a_broken_torchvision_is_named_where_transformers_fails_on_it",
    ),
    "foreign code": (
        "test_a_pickle_is_refused_and_not_read", "test_a_pickle_is_refused_whatever_it_calls_itself",
        "test_reading_a_checkpoint_runs_no_code", "test_code_of_a_repository_runs_only_when_asked_for",
        "test_without_a_token_nothing_is_served_off_loopback",
    ),
}  # fmt: skip


@cache
def existing() -> frozenset[str]:
    return frozenset(
        name for path in TESTS.rglob("test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text())
    )


@pytest.mark.parametrize("way", GUARDS)
def test_every_way_to_fail_has_a_test(way: str) -> None:
    assert GUARDS[way] and not set(GUARDS[way]) - existing()


def networks(found: Any, depth: int = 3) -> Iterator[nn.Module]:
    """Modules among the attributes of a reward and of what it is made of."""
    for value in list(getattr(found, "__dict__", {}).values()):
        if isinstance(value, nn.Module):
            yield value
        elif depth and hasattr(value, "__dict__") and not isinstance(value, type):
            yield from networks(value, depth - 1)


@pytest.mark.parametrize("name", ["aesthetic", "clipscore", "deqa", "hpsv2", "hpsv3", "imagereward", "pickscore"])
def test_every_network_is_in_eval_mode_and_frozen(name: str) -> None:
    reward = registry.load(name, **tiny_models.options(name))
    with torch.enable_grad():
        score(reward, torch.rand(1, 3, 32, 32), ["the red"], [{}], ["a"])
    found = list(networks(reward))
    assert found
    for module in found:
        assert not any(part.training for part in module.modules())
        assert not any(parameter.requires_grad for parameter in module.parameters())


def test_a_task_that_a_prompt_is_not_of_leaves_no_number_behind() -> None:
    """Counts of one task are no entries of another: a mean by task is over the pictures of that task alone."""
    rows = [
        {"tag": "counting", "include": [{"class": "ring", "count": 2}]},
        {"tag": "colors", "include": [{"class": "star", "count": 1, "color": "red"}]},
    ]
    drawn = [np.asarray(render(scene_for(row, np.random.default_rng(0)))) for row in rows]
    images = torch.from_numpy(np.stack(drawn)).permute(0, 3, 1, 2) / 255
    out = score(registry.load("geneval"), images, ["", ""], rows, ["a", "b"])
    numbers = [entry for column in out.details.values() for entry in column if isinstance(entry, (int, float))]
    assert all(0 <= number <= 1 for number in numbers)
    samples = tuple(Sample(k, str(k), 0) for k in range(2))
    values = {"reward": np.array([1.0, float("nan")])}
    found = Evaluation(samples, ("counting", "colors"), values, torch.zeros(0))
    assert found.by_tag()["counting"] == 1.0 and np.isnan(found.by_tag()["colors"]) and found.mean() == 1.0
