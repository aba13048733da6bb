"""What may happen to a training: killed workers and drivers, other numbers of workers, damage, a store and a node that go."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from jobs import ROOT, Finished, finish
from test_train import exported, wait_for_checkpoint, with_vocabulary, write_recipe, writer_of
from tiny_training import Tiny, make_tiny

from drafter.claim import claim
from drafter.run import Run
from drafter.session import train
from drafter.sources import open_sources
from ray_jobs import train as train_job
from ray_jobs.recipe import load_recipe
from storage.errors import StatehouseError

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]
# So many that training cannot end before it is killed three times.
EPOCHS = 160
Start = Callable[..., subprocess.Popen[str]]
RunJob = Callable[..., Finished]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    folder = tmp_path_factory.mktemp("faults")
    return with_vocabulary(make_tiny(str(folder), folder))


def losses(run: Run) -> list[float]:
    return [json.loads(line)["loss"] for line in run.store.get("metrics.jsonl").decode().splitlines()]


def undisturbed(tiny: Tiny, name: str = "undisturbed", **training: Any) -> Run:
    request = tiny.request(name, **training)
    claim(request, open_sources(request))
    torch.set_num_threads(1)
    assert train(request) is not None
    return Run(request.run)


def end(driver: subprocess.Popen[str]) -> None:
    """SIGKILL; its workers go with it."""
    children = psutil.Process(driver.pid).children(recursive=True)
    driver.kill()
    driver.communicate()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert all(one.status() == psutil.STATUS_ZOMBIE for one in alive), alive


def test_killed_worker_killed_driver_damaged_checkpoint_and_one_two_three_workers_end_where_an_undisturbed_process_does(
    tiny: Tiny, tmp_path: Path, start_job: Start, run_job: RunJob
) -> None:
    every = {"checkpoint_every": 10, "keep_checkpoints": 20}
    path = write_recipe(tiny, tmp_path / "recipe.yaml", epochs=EPOCHS, lr=1e-3, run="killed", **every)
    run = Run(f"{tiny.root}/dataset-runs/killed")
    # Two workers, of which the first is killed: Ray Train starts them again.
    driver = start_job("train", path)
    first = wait_for_checkpoint(run, driver)
    killed, deadline = writer_of(run, first), time.monotonic() + 200
    os.kill(killed, signal.SIGKILL)
    while True:
        newest = wait_for_checkpoint(run, driver, first)
        with contextlib.suppress(StatehouseError):  # pruned in between
            if writer_of(run, newest) != killed:
                break
        assert time.monotonic() < deadline
        time.sleep(0.05)
    end(driver)
    # One worker, until it has got further.
    driver = start_job("train", path, "training.workers=1")
    wait_for_checkpoint(run, driver, newest)
    end(driver)
    assert run.summary() is None, "it ended before it was killed"
    # The newest checkpoint is damaged: three workers go on from the one before.
    *_, before, newest = run.checkpoints.updates()
    damaged = Path(run.uri) / f"checkpoints/{newest:08d}/optimizer.safetensors"
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    finished = run_job("train", path, "training.workers=3")
    assert finished.code == 0, finished.err
    assert "checkpoint damaged, the one before is taken" in finished.err
    assert f"train resumed update={before}/" in finished.err
    summary = run.summary()
    assert summary is not None
    assert summary["resumed"] >= 2  # as the checkpoint before the damaged one counted
    assert summary["workers"] == 3
    assert {"report.html", "curves.png"} <= set(run.store.sizes())
    reference = undisturbed(tiny, epochs=EPOCHS, lr=1e-3, checkpoint_every=1000)
    np.testing.assert_allclose(losses(run), losses(reference), rtol=2e-2)
    assert reference.summary()["loss_after"] == pytest.approx(summary["loss_after"], rel=1e-2)  # type: ignore[index]


class Gate:
    """A door to a server: while it is shut, connections are refused and the open ones are cut, as when it is killed."""

    def __init__(self, endpoint: str) -> None:
        host, port = endpoint.split("//")[1].split(":")
        self._target = (host, int(port))
        self._open: set[socket.socket] = set()
        self._listener = self._listen(0)
        self.port = self._listener.getsockname()[1]
        self.served = 0

    def _listen(self, port: int) -> socket.socket:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(128)
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        return listener

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection(self._target)
                self.served += 1
                self._open |= {near, far}
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self._pump, args=pair, daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            self._open.discard(one)

    def shut(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for one in list(self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def reopen(self) -> None:
        self._listener = self._listen(self.port)


@pytest.fixture
def gate(s3_server: str) -> Iterator[Gate]:
    made = Gate(s3_server)
    yield made
    made.shut()


def test_a_store_that_is_down_for_twenty_seconds_is_waited_for(
    s3_server: str, gate: Gate, tmp_path: Path, start_job: Start
) -> None:
    tiny = with_vocabulary(make_tiny(f"s3://statehouse/down-{os.getpid()}", tmp_path))
    options = {"epochs": 120, "lr": 1e-3}
    path = write_recipe(
        tiny, tmp_path / "recipe.yaml", **options, workers=1, checkpoint_every=10,
        loader={"ahead_bytes": 1},  # or all would have been read long before
    )  # fmt: skip
    run = Run(f"{tiny.root}/dataset-runs/tiny")
    driver = start_job("train", path, AWS_ENDPOINT_URL=f"http://127.0.0.1:{gate.port}")
    wait_for_checkpoint(run, driver)
    gate.shut()
    time.sleep(20)
    assert driver.poll() is None, driver.communicate()
    stood = run.checkpoints.updates()[-1]
    gate.reopen()
    finished = finish(driver)
    assert finished.code == 0, finished.err
    assert "store fails, trying again" in finished.err
    assert "restarts=" not in finished.err
    summary = run.summary()
    assert summary is not None
    assert stood < summary["updates"]
    reference = undisturbed(tiny, **options, checkpoint_every=1000)
    np.testing.assert_allclose(losses(run), losses(reference), rtol=2e-2)


def test_a_node_that_goes_leaves_fewer_workers_that_carry_on(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray
    from ray.cluster_utils import Cluster

    impatient = {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "10"}
    for name, value in impatient.items():
        monkeypatch.setenv(name, value)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        node = cluster.add_node(num_cpus=1)
        environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **impatient}
        ray.init(address=cluster.address, log_to_driver=False, runtime_env={"env_vars": environment})
        path = write_recipe(
            tiny, tmp_path / "recipe.yaml", epochs=EPOCHS, lr=1e-3, run="node", checkpoint_every=10, min_workers=1
        )
        run, lost = Run(f"{tiny.root}/dataset-runs/node"), threading.Event()

        def lose() -> None:
            while not run.checkpoints.updates():
                time.sleep(0.05)
            cluster.remove_node(node, allow_graceful=False)  # kill -9 of its raylet
            lost.set()

        thread = threading.Thread(target=lose)
        thread.start()
        train_job.run(load_recipe(path), argparse.Namespace(fresh=False))
        thread.join()
        assert lost.is_set()
    finally:
        ray.shutdown()
        cluster.shutdown()
    summary = run.summary()
    assert summary is not None
    assert summary["workers"] == 1
    assert summary["resumed"] >= 1
    reference = undisturbed(tiny, "undisturbed-node", epochs=EPOCHS, lr=1e-3, checkpoint_every=1000)
    np.testing.assert_allclose(losses(run), losses(reference), rtol=2e-2)
    assert exported(run).keys() == exported(reference).keys()
