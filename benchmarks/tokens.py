"""Small sequences of a large dataset, in random order: what their tokens cost beside their states.

Token ids lie in chunks of 1 Mi tokens, so each of a few random sequences meets a chunk of its own. The states are made
tiny (4 channels), or a dataset of more than 40 such chunks would take minutes to write.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from benchmarks.corpus import fill_dataset, plan_corpus, synthetic_states
from benchmarks.opening import CountingStore
from benchmarks.proxy import proxy_process
from benchmarks.report import Report
from storage import layout
from storage.objects import open_store
from storage.reader import Dataset

CHUNKS, LENGTH, READ = 42, 4096, 6


def measure_tokens(
    report: Report, uri: str, endpoint: str, link: float, delay: float, timed: Callable[..., Any], repetitions: int
) -> None:
    """Cold reads of one sequence after another through a link of `link` bytes/s that adds `delay` seconds to each request."""
    count = CHUNKS * layout.TOKEN_CHUNK // LENGTH
    corpus, table = plan_corpus(uri, np.full(count, LENGTH), synthetic_states(8192, layers=1, hidden_size=4))
    fill_dataset(corpus, table)
    places = corpus.plan.column("start") // layout.TOKEN_CHUNK
    rows = [int(np.flatnonzero(places == chunk)[0]) for chunk in range(3, CHUNKS, CHUNKS // READ)][:READ]

    def states(dataset: Dataset) -> None:
        for row in rows:
            dataset.read_planes(row)

    def tokens(dataset: Dataset) -> None:
        for row in rows:
            dataset.tokens(row)

    def both(dataset: Dataset) -> None:
        for row in rows:
            dataset.read(row)

    with proxy_process(endpoint, bandwidth=link, delay=delay) as distant:
        os.environ["AWS_ENDPOINT_URL"] = distant
        for name, action in (("states alone", states), ("tokens alone", tokens), ("both", both)):
            seconds = []
            for _ in range(repetitions):
                dataset = Dataset(open_store(corpus.dataset_uri))  # nothing cached
                seconds.append(timed(lambda action=action, dataset=dataset: action(dataset))[0] / len(rows))
            report.row(f"{CHUNKS} token chunks, cold, {delay * 1e3:.0f} ms away: {name}", "s/sequence", seconds)
    os.environ["AWS_ENDPOINT_URL"] = endpoint
    counting: Any = CountingStore(open_store(corpus.dataset_uri))
    dataset = Dataset(counting)
    before, everything = counting.calls["get"], np.random.default_rng(0).integers(0, count, 400).tolist()
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(dataset.read, everything))
    touched = 2 * len(np.unique(places[everything]))
    report.row(
        f"{CHUNKS} token chunks: GETs of 16 threads",
        "GETs",
        [counting.calls["get"] - before],
        note=f"400 random sequences touch {touched} objects of ids and masks",
    )
