"""What happens around a replica: its node, the store, the disk, the credentials. Afterwards the dataset is whole.

Each on a Ray of its own; the table of what was tried is printed at the end of the run.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import faulty
import psutil
import pytest
from faulty import TRIED, Case, wait_for

from benchmarks.proxy import Fault, Proxy
from benchmarks.seaweed import seaweedfs
from storage.errors import StatehouseError

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(280)]
PATH = os.pathsep.join(map(str, [faulty.ROOT, *(faulty.ROOT / "tests" / name for name in ("ray_jobs", "storage"))]))


@contextlib.contextmanager
def ray_of_its_own(address: str = "local", **more: Any) -> Iterator[None]:
    import ray

    names = ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION")
    environment = {"PYTHONPATH": PATH, "OMP_NUM_THREADS": "1", **{n: os.environ[n] for n in names if n in os.environ}}
    ray.init(address=address, log_to_driver=False, runtime_env={"env_vars": environment}, **more)
    try:
        yield
    finally:
        ray.shutdown()


def test_a_node_that_is_lost_takes_its_replicas_and_nothing_else(tmp_path: Path) -> None:
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        nodes = [cluster.add_node(num_cpus=2) for _ in range(2)]
        with ray_of_its_own(cluster.address):
            case = Case(tmp_path, count=400, replicas=3)
            supervisor = case.supervisor(seconds=1.5)  # a busy machine needs its time to lose a node

            def lose() -> None:
                wait_for(lambda: len(case.missing()) <= case.plan.geometry.shards - 2, 120)
                cluster.remove_node(nodes[0], allow_graceful=False)  # kill -9 of its raylet

            thread = threading.Thread(target=lose)
            thread.start()
            case.fill(supervisor)
            thread.join()
            assert supervisor.counts()["restarts"] >= 1
            case.require_whole("node lost (raylet killed -9)")
    finally:
        cluster.shutdown()


def weed_of(endpoint: str) -> psutil.Process:
    port = endpoint.rsplit(":", 1)[1]
    children = psutil.Process().children(recursive=True)
    return next(one for one in children if f"-s3.port={port}" in one.cmdline())


def test_a_store_that_is_away_for_ten_seconds(tmp_path: Path) -> None:
    with seaweedfs("faults") as endpoint, ray_of_its_own(num_cpus=2, include_dashboard=False):
        case = Case(tmp_path, "s3://faults/dataset", count=400, replicas=2)
        again: list[subprocess.Popen[bytes]] = []

        def away() -> None:
            wait_for(lambda: len(case.missing()) <= case.plan.geometry.shards - 2, 120)
            server = weed_of(endpoint)
            command = server.cmdline()
            os.killpg(server.pid, signal.SIGKILL)
            time.sleep(10)
            again.append(
                subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT, start_new_session=True)
            )

        thread = threading.Thread(target=away)
        thread.start()
        try:
            ended = "went on"
            try:
                case.fill(case.supervisor(seconds=0.2))
            except StatehouseError as error:  # it may give up before the server is back: then it says what to do
                assert "run the same command again" in str(error)
                ended = "said so; the same command finished it"
            thread.join()
            _until_it_answers(case)
            case.fill(case.supervisor())
            case.require_whole("store killed for 10 s")
            TRIED["store killed for 10 s, the job", ended] += 1
        finally:
            for process in again:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


def _until_it_answers(case: Case) -> None:
    for _ in range(60):
        with contextlib.suppress(StatehouseError):
            case.missing()
            return
        time.sleep(0.5)


def test_credentials_that_expire_end_the_job_with_a_word_and_the_next_run_finishes(tmp_path: Path) -> None:
    # Undone before the server's own AWS_* are, or later tests would ask a server that is gone.
    with seaweedfs("expiry") as endpoint, pytest.MonkeyPatch.context() as monkeypatch:
        host, port = endpoint.removeprefix("http://").split(":")
        proxy = Proxy((host, int(port)), fault=None)
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        with ray_of_its_own(num_cpus=2, include_dashboard=False):
            case = Case(tmp_path, "s3://expiry/dataset", count=400, replicas=2)

            def expire() -> None:
                wait_for(lambda: len(case.missing()) <= case.plan.geometry.shards - 2, 120)
                proxy.fault = Fault("403", times=-1, method="PUT", path="hidden/c")

            thread = threading.Thread(target=expire)
            thread.start()
            with pytest.raises(StatehouseError, match="refused these credentials") as caught:
                case.fill(case.supervisor(seconds=0.2))
            thread.join()
            assert "ExpiredToken" in str(caught.value)
            assert case.missing()
            proxy.fault = None
            case.fill(case.supervisor())
            case.require_whole("credentials expire")
        proxy.close()


def test_a_full_disk_ends_the_job_with_a_word_and_the_next_run_finishes(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("mounting a small file system is not allowed here")
    try:
        with ray_of_its_own(num_cpus=2, include_dashboard=False):
            case = Case(tmp_path, str(disk / "dataset"), count=400, replicas=2)
            with pytest.raises(StatehouseError, match="No space left|full|space"):
                case.fill(case.supervisor())
            assert case.missing()
            subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
            case.fill(case.supervisor())
            case.require_whole("disk full")
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=False)


def test_sigterm_drains_what_is_in_flight_within_its_grace(tmp_path: Path) -> None:
    with ray_of_its_own(num_cpus=2, include_dashboard=False):
        case = Case(tmp_path, count=400, replicas=1, drain_s=30)

        def stop() -> None:
            wait_for(lambda: len(case.missing()) < case.plan.geometry.shards, 120)
            os.kill(os.getpid(), signal.SIGTERM)

        thread = threading.Thread(target=stop)
        thread.start()
        supervisor = case.supervisor(seconds=1.0)
        with pytest.raises(SystemExit):
            case.fill(supervisor)
        thread.join()
        left = case.missing()
        assert left
        assert len(left) <= case.plan.geometry.shards - 2  # what was in flight is stored
        case.fill(case.supervisor())
        case.require_whole("SIGTERM")
