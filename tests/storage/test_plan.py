from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import contract, sequences

from storage.contract import sha256_json
from storage.errors import StatehouseError
from storage.layout import plan_objects
from storage.plan import Plan, chunk_tokens, make_plan, pack, shard_tokens
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
    with pytest.raises(StatehouseError, match=r"dataset.shard_tokens makes shards of \d+.\d GB"):
        make_plan(table, contract(), "lossless", shard_length=1 << 25)


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=100), capacity=st.integers(1, 40))
def test_sequences_longer_than_a_shard_take_runs_and_nothing_overlaps(lengths: list[int], capacity: int) -> None:
    shard, offset, shards = pack(np.array(lengths), capacity)
    start = shard.astype(np.int64) * capacity + offset
    spans = sorted((int(at), int(at) + length) for at, length in zip(start, lengths, strict=True))
    assert all(left[1] <= right[0] for left, right in zip(spans, spans[1:], strict=False))
    assert max(end for _, end in spans) <= shards * capacity
    used = np.zeros(shards * capacity, bool)
    for (begin, end), row in zip(spans, np.argsort(start), strict=True):
        used[begin:end] = True
        spanned = (end - 1) // capacity - begin // capacity + 1
        if lengths[row] > capacity:
            assert begin % capacity == 0  # a run begins with its sequence
        assert spanned == -(-lengths[row] // capacity)
    by_shard = used.reshape(shards, capacity)
    assert by_shard[:, 0].all()
    assert not (np.diff(by_shard.astype(np.int8), axis=1) > 0).any()  # used places lie at the beginning, without a gap


def long_plan(capacity_chunks: int = 1) -> Plan:
    """Chunks and shards are 1,024 tokens at H = 64: sequences of up to five shards."""
    table = sequences(24, 5000, seed=3)
    return make_plan(table, contract(), "lossless", shard_length=1024 * capacity_chunks)


def test_a_unit_is_a_run_of_shards_with_all_that_lies_in_it() -> None:
    plan = long_plan()
    assert (plan.column("length") > plan.geometry.shard_tokens).any()
    start, length, rows = plan.column("start"), plan.column("length"), plan.shard_rows()
    next_shard, seen = 0, []
    for unit in plan.units():
        assert unit.shard == next_shard
        position = unit.shard * plan.geometry.shard_tokens
        for row in unit.rows:
            assert start[row] == position
            position += length[row]
        assert rows[unit.shard : unit.shard + unit.shards].sum() == unit.tokens
        assert (rows[unit.shard : unit.shard + unit.shards - 1] == plan.geometry.shard_tokens).all()
        next_shard += unit.shards
        seen += unit.rows.tolist()
    assert next_shard == plan.geometry.shards
    assert sorted(seen) == list(range(len(plan.table)))


def test_the_planner_gives_a_sequence_beyond_one_gib_a_run_of_ordinary_shards() -> None:
    assert shard_tokens(10_000_000, 18_000, 4, 7168) >= 18_000
    assert shard_tokens(10_000_000, 100_000, 4, 7168) == 8192


@pytest.mark.slow
def test_a_million_sequences_are_planned_in_a_minute_and_4_gib() -> None:
    """1.7 billion tokens, in a process of its own so that its memory can be told."""
    code = """
import time
from benchmarks.memory import peak
from benchmarks.opening import contract, length_table, plan_lengths
table = length_table(1_000_000)
began = time.process_time()
plan = plan_lengths(table, contract(), "lossless")
plan.hash, sum(unit.tokens for unit in plan.units())
print(plan.tokens, plan.geometry.tokens, time.process_time() - began, peak())
"""
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    tokens, places, seconds, most = (float(word) for word in done.stdout.split())
    assert tokens > 1.6e9
    assert places / tokens < 1.02
    assert seconds < 60
    assert most < 4 * 2**30


def test_columns_in_many_arrow_chunks_give_the_same_plan() -> None:
    """One Arrow list array holds at most 2**31 - 1 tokens, so a large table comes in several."""
    table = sequences(40)
    pieces = pa.concat_tables([table.slice(0, 7), table.slice(7, 20), table.slice(27)])
    assert pieces["token_ids"].num_chunks == 3
    plan = make_plan(pieces, contract(), "lossless")
    assert plan.hash == make_plan(table, contract(), "lossless").hash
    whole = dict(plan_objects(make_plan(table, contract(), "lossless"), table))
    assert dict(plan_objects(plan, pieces)) == whole


def test_the_hash_is_that_of_its_definition() -> None:
    plan = make_plan(sequences(30), contract(), "lossless")
    digest = hashlib.sha256()
    for name in plan.table.column_names:
        for value in plan.table[name].to_pylist():
            if isinstance(value, str):
                digest.update(len(value.encode()).to_bytes(4, "little") + value.encode())
            else:
                digest.update(value.to_bytes(8 if name == "start" else 4, "little"))
    fields = {"contract": plan.contract.hash, "codec": "lossless", "geometry": plan.geometry.model_dump()}
    assert plan.hash == sha256_json({**fields, "sequences": digest.hexdigest()})
