"""A tiny dataset whose states are a function of the sequence's id, so that any test can make them again."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pyarrow as pa
import pytest

from storage.cli import main
from storage.commit import publish_plan
from storage.contract import Contract
from storage.objects import open_store
from storage.plan import Plan, WorkUnit, make_plan
from storage.seal import Seal, seal_dataset
from storage.sequences import Sequence, sequence_table
from storage.writer import ShardWriter

LAYERS, HIDDEN, VOCAB = 4, 64, 1000


def contract(**changes: object) -> Contract:
    fields = {
        "verifier": "tiny",
        "config_hash": "c",
        "weights_hash": "w",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_layers": 8,
        "tokenizer_hash": "t",
        "capture_layers": (1, 3, 4),
        "engine": "test",
        "engine_version": "1",
        "engine_dtype": "bfloat16",
    }
    return Contract.model_validate({**fields, **changes})


def sequences(count: int = 60, longest: int = 300, seed: int = 0) -> pa.Table:
    random = np.random.default_rng(seed)
    return sequence_table(
        Sequence(
            ("code", "maths", "chat")[number % 3],
            f"group-{number // 2}",
            random.integers(0, VOCAB, length).astype(np.int32),
            random.random(length) < 0.5,
        )
        for number, length in enumerate(random.integers(2, longest, count))
    )


def states_of(sequence_id: str, length: int) -> np.ndarray:
    """bf16 bits uint16 [T, L, H]: channels of very different scales, as real ones are."""
    random = np.random.default_rng(int(sequence_id[:12], 16))
    scale = np.exp(np.random.default_rng(1).normal(0, 2, (1, LAYERS, HIDDEN)))
    return (random.standard_normal((length, LAYERS, HIDDEN)) * scale).astype(ml_dtypes.bfloat16).view(np.uint16)


def unit_states(plan: Plan, unit: WorkUnit) -> np.ndarray:
    ids, lengths = plan.table["id"], plan.column("length")
    return np.concatenate([states_of(ids[int(row)].as_py(), int(lengths[row])) for row in unit.rows])


def planned(uri: str, table: pa.Table | None = None, codec: str = "lossless", **changes: object) -> Plan:
    table = sequences() if table is None else table
    plan = make_plan(table, contract(**changes), codec)
    publish_plan(open_store(uri), plan, table)
    return plan


def fill(uri: str, plan: Plan, shards: set[int] | None = None) -> list[bool]:
    """Writes shards (all by default); says of each whether this call created it."""
    writer = ShardWriter.from_uri(uri)
    created = []
    for unit in plan.units():
        if shards is None or unit.shard in shards:
            bits = unit_states(plan, unit)
            if not writer.calibrated:
                writer.calibrate(bits)
            created.append(writer.write(unit.shard, bits, len(unit.rows)).created)
    return created


def refill(uri: str, plan: Plan, shards: set[int], noise: int = 0) -> None:
    """What the extract job does with holes; noise changes a mantissa bit, as another GPU would.

    Another host is written down, since two receipts of one host within one second are the same to the byte.
    """
    writer = ShardWriter.from_uri(uri)
    for unit in plan.units():
        if unit.shard in shards:
            bits = unit_states(plan, unit)
            bits[0, 0, 0] ^= noise
            writer.write(unit.shard, bits, len(unit.rows), written_by={"host": "another"})


def sealed(uri: str, table: pa.Table | None = None, codec: str = "lossless") -> tuple[Plan, Seal]:
    plan = planned(uri, table, codec)
    fill(uri, plan)
    return plan, seal_dataset(open_store(uri), plan)


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one error line of `statehouse ...`, which must end with 1."""
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    assert caught.value.code == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    return error
