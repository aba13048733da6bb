from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import contract, sequences

from storage.errors import StatehouseError
from storage.plan import chunk_tokens, make_plan, pack, shard_tokens
from storage.sequences import Sequence, sequence_table


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=200), spare=st.integers(0, 30))
def test_packing_keeps_sequences_whole_apart_and_without_gaps(lengths: list[int], spare: int) -> None:
    capacity = max(lengths) + spare
    shard, offset, shards = pack(np.array(lengths), capacity)
    assert set(shard) == set(range(shards))
    for one in range(shards):
        members = np.flatnonzero(shard == one)
        spans = sorted((int(offset[m]), int(offset[m]) + lengths[m]) for m in members)
        assert spans[0][0] == 0
        assert spans[-1][1] <= capacity
        assert all(left[1] == right[0] for left, right in zip(spans, spans[1:], strict=False))


def test_packing_wastes_less_than_two_percent_of_the_axis_on_a_realistic_mix() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(7.1, 0.8, 20_000), 1, 8192).astype(np.int64)
    _, _, shards = pack(lengths, 8192)
    assert shards * 8192 / lengths.sum() < 1.02


def test_the_plan_depends_on_content_alone_not_on_order_or_duplicates() -> None:
    table = sequences(40)
    rows = [
        Sequence(r["source"], r["group"], np.array(r["token_ids"], np.int32), np.array(r["loss_mask"]))
        for r in table.to_pylist()
    ]
    shuffled = [rows[i] for i in np.random.default_rng(3).permutation(len(rows))]
    again = sequence_table([*shuffled, *rows[:7]])
    assert again.equals(table)
    assert make_plan(again, contract(), "lossless").hash == make_plan(table, contract(), "lossless").hash


def test_the_hash_changes_with_contract_codec_and_any_sequence() -> None:
    table = sequences(20)
    hashes = {
        make_plan(table, contract(), "lossless").hash,
        make_plan(table, contract(), "raw").hash,
        make_plan(table, contract(config_hash="other"), "lossless").hash,
        make_plan(table.slice(1), contract(), "lossless").hash,
    }
    assert len(hashes) == 4
    recorded = make_plan(table, contract(engine_version="2", tp_size=8), "lossless")
    assert recorded.hash in hashes  # what is merely recorded does not count: another engine may finish the work


def test_kimi_shards_hold_8192_tokens_and_chunks_32() -> None:
    assert chunk_tokens(4, 7168) == 32
    assert shard_tokens(17_300_000, 8000, 4, 7168) == 8192


def test_small_hidden_sizes_get_chunks_of_at_least_256_kib() -> None:
    for hidden in (64, 576, 2048):
        assert chunk_tokens(4, hidden) * 4 * hidden >= 256 * 1024


def test_units_cover_every_sequence_once_in_the_order_in_which_they_lie() -> None:
    plan = make_plan(sequences(80), contract(), "lossless")
    start, length = plan.column("start"), plan.column("length")
    seen: list[int] = []
    for unit in plan.units():
        position = unit.shard * plan.geometry.shard_tokens
        for row in unit.rows:
            assert start[row] == position
            position += length[row]
        seen += unit.rows.tolist()
        assert unit.tokens == plan.shard_rows()[unit.shard]
    assert sorted(seen) == list(range(80))


def test_bad_input_is_named() -> None:
    table = sequences(10)
    with pytest.raises(StatehouseError, match="token id 1500, outside the verifier's vocabulary of 1000"):
        bad = Sequence("code", "g", np.array([3, 1500], np.int32), np.array([True, True]))
        make_plan(sequence_table([bad]), contract(), "lossless")
    with pytest.raises(StatehouseError, match="no sequences"):
        make_plan(table.slice(0, 0), contract(), "lossless")
    with pytest.raises(StatehouseError, match="dataset.shard_tokens is 3, but the longest"):
        make_plan(table, contract(), "lossless", shard_length=3)
