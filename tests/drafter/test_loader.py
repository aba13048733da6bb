"""The loader: what it packs is what was stored, it reads no further ahead than it may, and errors reach the trainer."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from tiny_training import Tiny

from drafter.argmax_cache import ArgmaxCache
from drafter.loader import Loader, pack
from drafter.loss import loss_rows
from drafter.verifier_head import VerifierHead
from drafter.verifier_weights import read_verifier_weights
from storage import open_dataset
from storage.errors import ShardCorrupt
from vocab.mapping import DraftVocab


def test_a_packed_batch_holds_the_stored_sequences_side_by_side(tiny: Tiny) -> None:
    dataset = open_dataset(f"{tiny.root}/dataset")
    wanted = [np.array([3, 0]), np.array([7]), np.array([1, 2, 4])]
    with Loader(dataset, wanted) as loader:
        batches = list(loader)
    assert [batch.rows for batch in batches] == [(3, 0), (7,), (1, 2, 4)]
    for batch in batches:
        start = 0
        for row, length in zip(batch.rows, batch.lengths, strict=True):
            states = dataset.read(row)
            part = slice(start, start + length)
            hidden = states.torch()
            assert torch.equal(batch.token_ids_T[part], torch.tensor(states.token_ids).long())
            assert torch.equal(batch.loss_mask_T[part], torch.tensor(states.loss_mask))
            assert torch.equal(batch.features_TF[part], hidden[:, :-1].flatten(1))
            assert torch.equal(batch.final_TD[part], hidden[:, -1])
            start += length
        assert start == len(batch.token_ids_T) == len(batch.features_TF)


def test_it_reads_ahead_but_no_further_than_it_may(tiny: Tiny) -> None:
    asked = []

    def micro_batches() -> Iterator[np.ndarray]:
        for row in range(20):
            asked.append(row)
            yield np.array([row])

    with Loader(open_dataset(f"{tiny.root}/dataset"), micro_batches(), ahead=2) as loader:
        assert loader.next() is not None
        deadline = time.monotonic() + 20
        while len(asked) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.2)
        assert len(asked) == 4  # one taken, two ready, one that waits for room
        assert loader.waited_s > 0
    assert not any(thread.name == "loader" for thread in threading.enumerate())


def test_an_error_while_reading_comes_out_of_next_again_and_again(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = open_dataset(f"{tiny.root}/dataset")
    read = dataset.read

    def broken(row: int) -> object:
        if row == 2:
            raise ShardCorrupt("hidden/c/0/1/0/0: bad checksum")
        return read(row)

    monkeypatch.setattr(dataset, "read", broken)
    with Loader(dataset, [np.array([0]), np.array([1, 2])]) as loader:
        assert loader.next() is not None
        for _ in range(2):
            with pytest.raises(ShardCorrupt, match="bad checksum"):
                loader.next()


def test_the_verifiers_argmax_is_computed_once_a_sequence_whatever_it_is_packed_with(tiny: Tiny) -> None:
    dataset = open_dataset(f"{tiny.root}/dataset")
    vocabulary = DraftVocab.from_ids(range(9), dataset.contract.vocab_size)
    head = VerifierHead(read_verifier_weights(tiny.verifier).lm_head_VD, vocabulary)
    cache = ArgmaxCache(head)
    states = [dataset.read(row) for row in range(4)]
    for rows in ([0, 1, 2], [2, 3, 0]):
        batch = cache.fill(pack(rows, [states[row] for row in rows]))
        assert batch.argmax_T is not None
        teacher_M = loss_rows(batch.loss_mask_T, batch.lengths, 1)[0].nonzero().squeeze(1) + 1
        assert len(teacher_M) > 0
        assert torch.equal(batch.argmax_T[teacher_M], head.argmax(batch.final_TD[teacher_M]))
    cache.head = None  # type: ignore[assignment]  # all four are known by now
    cache.fill(pack([3, 1], [states[3], states[1]]))
