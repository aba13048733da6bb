"""Tokens of a large dataset: every chunk is fetched once however many ask, and what is kept is bounded."""

from __future__ import annotations

import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from tiny import planned, sequences

from storage import layout
from storage.commit import PlanDocument, load_plan_document
from storage.errors import StoreError
from storage.objects import LocalStore
from storage.plan import Plan
from storage.token_reader import TokenReader


class Slow(LocalStore):
    """Counts GETs, and takes its time for them."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.gets: Counter[str] = Counter()
        self.at_once = self.most = self.failures = 0
        self.open = threading.Event()  # GETs wait for it
        self.open.set()
        self._counting = threading.Lock()

    def get(self, key: str) -> bytes:
        with self._counting:
            self.gets[key] += 1
            self.at_once += 1
            self.most = max(self.most, self.at_once)
            fails = self.failures > 0 and key.startswith("tokens/")
            self.failures -= fails
        time.sleep(0.02)
        self.open.wait(30)
        with self._counting:
            self.at_once -= 1
        if fails:
            raise StoreError(f"{key}: the store failed")
        return super().get(key)


@pytest.fixture
def many_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Slow, PlanDocument, Plan, pa.Table]:
    """More than 40 chunks of tokens, some sequences across two."""
    monkeypatch.setattr(layout, "TOKEN_CHUNK", 256)
    table = sequences(80, 300)
    plan = planned(str(tmp_path), table)
    assert plan.geometry.tokens > 40 * 256
    return Slow(tmp_path), load_plan_document(LocalStore(tmp_path)), plan, table


def test_all_rows_come_back_whatever_chunks_they_lie_in(
    many_chunks: tuple[Slow, PlanDocument, Plan, pa.Table],
) -> None:
    store, document, plan, table = many_chunks
    reader = TokenReader(store, document)
    start, length = plan.column("start"), plan.column("length")
    asked = [reader.ask(int(start[row]), int(length[row])) for row in range(len(table))]
    for row, answer in enumerate(asked):
        ids, mask = answer()
        assert ids.tolist() == table["token_ids"][row].as_py()
        assert mask.tolist() == table["loss_mask"][row].as_py()
        ids[:] = 0  # the caller's own
    assert set(store.gets.values()) == {1}
    assert 1 < store.most <= 4  # both arrays, and several chunks, at once
    assert reader.ask(int(start[0]), 2)()[0].tolist() == table["token_ids"][0].as_py()[:2]


def test_threads_that_ask_for_one_chunk_at_once_share_its_get(
    many_chunks: tuple[Slow, PlanDocument, Plan, pa.Table],
) -> None:
    store, document, _, _ = many_chunks
    reader = TokenReader(store, document)
    threads = [threading.Thread(target=lambda: reader.ask(10, 20)()) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.gets == {layout.token_key("tokens", 0): 1, layout.token_key("loss_mask", 0): 1}


def test_what_is_kept_is_bounded_and_the_chunk_used_last_stays(
    many_chunks: tuple[Slow, PlanDocument, Plan, pa.Table],
) -> None:
    store, document, _, _ = many_chunks
    reader = TokenReader(store, document, cache_bytes=4 * 5 * 256)
    for chunk in range(8):
        reader.ask(0, 5)()
        reader.ask(chunk * 256, 5)()
        assert len(reader._chunks) <= 8
    assert store.gets[layout.token_key("tokens", 0)] == 1
    reader.ask(256, 5)()
    assert store.gets[layout.token_key("tokens", 1)] == 2


def test_an_error_is_raised_to_all_who_wait_and_not_kept(
    many_chunks: tuple[Slow, PlanDocument, Plan, pa.Table],
) -> None:
    store, document, _, _ = many_chunks
    reader = TokenReader(store, document)
    store.failures = 1  # the loss mask comes
    store.open.clear()
    first, second = reader.ask(0, 5), reader.ask(5, 5)
    store.open.set()
    for answer in (first, second):
        with pytest.raises(StoreError, match="the store failed"):
            answer()
    assert len(reader.ask(0, 5)()[0]) == 5
    assert isinstance(reader.ask(0, 5)()[1], np.ndarray)
