"""Batches and scores as bytes, and what is refused."""

from __future__ import annotations

import json
import pickle
import struct
from typing import Any

import numpy as np
import pytest
import torch

from flowrl_img.rewards import wire
from flowrl_img.rewards.known_answers import Better, Example, Scores
from flowrl_img.rewards.protocol import RewardBatch, RewardOutput
from flowrl_img.rewards.wire import WireError, answer_of, pack_answer, pack_batch, unpack_batch


def batch(groups: bool = True) -> RewardBatch:
    images = torch.randint(0, 256, (3, 5, 7, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    rows = [{"tag": "é", "include": [{"class": "ring", "count": 1}]}, {}, {"n": 2.5}]
    return RewardBatch(
        images, ["a “ring”", "", "b\n"], rows, ["p/0", "p/1", "q/0"], ["p", "p", "q"] if groups else None
    )


def body(**changes: Any) -> bytes:
    """A request whose header is changed."""
    packed = pack_batch(batch(), "raw")
    (length,) = struct.unpack(">I", packed[4:8])
    header = {**json.loads(packed[8 : 8 + length]), **changes}
    text = json.dumps({k: v for k, v in header.items() if v != "gone"}).encode()
    return packed[:4] + struct.pack(">I", len(text)) + text + packed[8 + length :]


@pytest.mark.parametrize("encoding", wire.ENCODINGS)
@pytest.mark.parametrize("groups", [True, False])
def test_a_batch_arrives_as_it_was_sent(encoding: str, groups: bool) -> None:
    sent = batch(groups)
    found = unpack_batch(pack_batch(sent, encoding))
    assert torch.equal(found.images, sent.images)
    assert (found.prompts, found.metadata, found.ids, found.group_ids) == (
        sent.prompts, sent.metadata, sent.ids, sent.group_ids
    )  # fmt: skip


@pytest.mark.parametrize("groups", [5, "ppq", {"p": 1}], ids=str)
def test_groups_that_are_no_list_are_refused(groups: Any) -> None:
    with pytest.raises(WireError, match="group_ids must be a list or null"):
        unpack_batch(body(group_ids=groups))


def test_metadata_that_is_no_json_is_refused_before_it_is_sent() -> None:
    odd = RewardBatch(batch().images[:1], [""], [{"when": object()}], ["a"])
    with pytest.raises(ValueError, match="metadata must be JSON to be sent"):
        pack_batch(odd)


class Bomb:
    """Unpickling this sets a mark."""

    went_off = False

    def __reduce__(self) -> Any:
        return setattr, (Bomb, "went_off", True)


def test_a_pickle_is_refused_and_not_read() -> None:
    for poison in (pickle.dumps(Bomb()), wire.MAGIC + struct.pack(">I", 40) + pickle.dumps(Bomb())):
        with pytest.raises(WireError):
            unpack_batch(poison)
    assert not Bomb.went_off


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (b"", "must begin with FRW1"),
        (b"FRW1", "must begin with FRW1"),
        (b"FRW1" + struct.pack(">I", 2**31) + b"{}", "should have 2147483648 bytes"),
        (b"FRW1" + struct.pack(">I", 2) + b"{]", "not JSON"),
        (b"FRW1" + struct.pack(">I", 2) + b"{}", "must hold the lists"),
        (body(shape=[3, 5, 7]), r"\[B, H, W, 3\]"),
        (body(shape=[3, 5, 7, 4]), r"\[B, H, W, 3\]"),
        (body(shape=[3, 50_000, 50_000, 3]), "more than 268,435,456 pixels"),
        (body(shape=[4, 5, 7, 3]), r"raw pictures of \[4, 5, 7\] have 420 bytes, got 315"),
        (body(shape=[-3, 5, 7, 3]), "positive numbers"),
        (body(sizes=[314]), "the body holds 315"),
        (body(sizes="all"), "the body holds 315"),
        (body(encoding="jpeg"), "png, raw, got 'jpeg'"),
        (body(encoding="png"), "3 pictures announced, 1 sent"),
        (body(encoding="png", sizes=[100, 100, 115]), "a picture is no PNG"),
        (body(ids=["a", "b"]), "does not describe a batch"),
        (body(ids=["a", "a", "b"]), "ids must be unique"),
        (body(ids=[1, 2, 3]), "must be strings"),
        (body(metadata=[1, 2, 3]), "one object a picture"),
        (body(prompts="gone"), "must hold the lists"),
        (body()[:-1], "the body holds 314"),
    ],
)
def test_a_body_that_contradicts_itself_is_refused(message: bytes, reason: str) -> None:
    with pytest.raises(WireError, match=reason):
        unpack_batch(message)


def test_a_png_of_another_size_is_refused_before_it_is_inflated() -> None:
    large = wire.png_of(np.zeros((2000, 2000, 3), np.uint8))
    with pytest.raises(WireError, match=r"a PNG is RGB \(2000, 2000\), announced as RGB \(7, 5\)"):
        header = {"ids": ["a"], "prompts": [""], "metadata": [{}], "shape": [1, 5, 7, 3], "encoding": "png"}
        text = json.dumps(header | {"sizes": [len(large)]}).encode()
        unpack_batch(wire.MAGIC + struct.pack(">I", len(text)) + text + large)


def test_scores_arrive_by_id_with_reasons_and_details() -> None:
    output = RewardOutput.of([1.5, None, -2.0], {"error": [None, "dark", None], "text": ["A", None, "B"]})
    named = RewardOutput(output.values, output.valid, output.details, ["a", "b", "c"])
    found = answer_of(json.dumps(pack_answer(named)).encode(), ["c", "a", "b"])
    assert found.values[:2].tolist() == [-2.0, 1.5] and found.valid.tolist() == [True, True, False]
    assert found.details["text"] == ["B", "A", None] and found.details["error"] == [None, None, "dark"]


@pytest.mark.parametrize("value", ["NaN", "Infinity", "null", '"0.5"', "true", "[1]"])
def test_anything_but_a_finite_number_is_invalid_and_not_zero(value: str) -> None:
    found = answer_of(f'{{"rows": [{{"id": "a", "value": {value}}}]}}'.encode(), ["a"])
    assert not found.valid.any() and found.values.isnan().all() and "the server gave" in found.details["error"][0]


@pytest.mark.parametrize(
    "content",
    [
        b"", b"<html>", b"[]", b'{"rows": 3}', b'{"rows": [{"value": 1}]}', b'{"rows": [{"id": "a", "value": 1}]}',
        b'{"rows": [{"id": "a", "value": 1}, {"id": "a", "value": 1}]}',
        b'{"rows": [{"id": "a", "value": 1}, {"id": "x", "value": 1}]}',
        b'{"rows": [{"id": "a", "value": 1}, {"id": "b", "value": 1}, {"id": "b", "value": 1}]}',
    ],
)  # fmt: skip
def test_an_answer_about_other_pictures_is_no_answer(content: bytes) -> None:
    with pytest.raises(WireError):
        answer_of(content, ["a", "b"])


def test_known_answers_arrive_with_their_pictures_and_bounds() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (4, 6, 3), np.uint8)
    one, two = Example("noise", noise, "a", {"tag": "x"}), Example("black", np.zeros((8, 8, 3), np.uint8))
    packed = json.loads(json.dumps(wire.pack_known_answers([Scores(one, low=0.5), Better((one,), (two, two))])))
    scores, better = wire.known_answers_of(packed)
    assert isinstance(scores, Scores) and (scores.low, scores.high) == (0.5, float("inf"))
    assert isinstance(better, Better) and [e.what for e in better.bad] == ["black", "black"]
    assert np.array_equal(better.good[0].image, noise) and better.good[0].metadata == {"tag": "x"}
    with pytest.raises(WireError, match="cannot be read"):
        wire.known_answers_of([{"scores": {"what": "x"}}])
