"""Other kinds of stores, and other ways to an S3 server: opened and read like any."""

from __future__ import annotations

import functools
import http.server
import os
import threading
import uuid
import zipfile
from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import pytest
from tiny import fails, sealed, sequences, states_of

from storage import find_datasets, open_dataset
from storage.errors import DatasetMissing, StoreError
from storage.objects import FsspecStore, LocalStore, ObjectMissing, open_store
from storage.verify import verify


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stores") / "dataset"
    sealed(str(folder), sequences(12, 200))
    return folder


def read_all(uri: str) -> None:
    dataset = open_dataset(uri)
    assert len(dataset) == 12
    for states in dataset.stream():
        assert (states.hidden.view(np.uint16) == states_of(states.id, len(states.token_ids))).all()


def test_a_dataset_in_memory_is_read_through_fsspec(whole: Path) -> None:
    uri = f"memory://{uuid.uuid4().hex}/dataset"
    source = LocalStore(whole)
    for key in source.sizes():
        fsspec.filesystem("memory").pipe_file(f"{uri}/{key}", source.get(key))
    read_all(uri)
    store = open_store(uri)
    assert isinstance(store, FsspecStore)
    assert store.sizes() == source.sizes()
    assert store.folders() == source.folders()
    assert find_datasets(uri.rsplit("/", 1)[0]) == [uri]
    assert verify(store, full=True).ok
    with pytest.raises(ObjectMissing):
        store.get("nothing")
    for write in (lambda: store.create("x", b""), lambda: store.put("x", b""), lambda: store.delete("seal.json")):
        with pytest.raises(StoreError, match="read but not written to"):
            write()


def test_a_dataset_in_an_archive_is_read_through_fsspec(whole: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        for path in whole.rglob("*"):
            if path.is_file():
                archive.write(path, Path("dataset", path.relative_to(whole)))
    read_all(f"zip://dataset::{tmp_path / 'x.zip'}")


@pytest.fixture
def web_server(whole: Path) -> Iterator[str]:
    """A plain web server that knows ranges, suffixes included, and cannot be listed."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            path = Path(self.translate_path(self.path))
            if not path.is_file():
                self.send_error(404)
                return
            data, wanted = path.read_bytes(), self.headers.get("Range")
            low, high = 0, len(data)
            if wanted:
                first, last = wanted.removeprefix("bytes=").split("-")
                low, high = (int(first), int(last) + 1) if first else (max(0, len(data) - int(last)), len(data))
            self.send_response(206 if wanted else 200)
            if wanted:
                self.send_header("Content-Range", f"bytes {low}-{min(high, len(data)) - 1}/{len(data)}")
            self.send_header("Content-Length", str(len(data[low:high])))
            self.send_header("ETag", f'"{path.stat().st_mtime_ns}"')
            self.send_header("Last-Modified", self.date_time_string(path.stat().st_mtime))
            self.end_headers()
            self.wfile.write(data[low:high])

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(whole.parent)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()


def test_a_dataset_on_a_web_server_is_read(web_server: str, capsys: pytest.CaptureFixture[str]) -> None:
    read_all(f"{web_server}/dataset")
    assert find_datasets(f"{web_server}/dataset") == [f"{web_server}/dataset"]
    for command in ("ls", "verify"):
        assert "cannot be listed" in fails(capsys, command, web_server if command == "ls" else f"{web_server}/dataset")
    with pytest.raises(DatasetMissing):
        open_dataset(f"{web_server}/nothing")


def test_kinds_of_uris_that_nobody_opens_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "nosuch" in fails(capsys, "info", "nosuch://x/y")


def copied(whole: Path, bucket: str) -> str:
    uri = f"s3://{bucket}/{uuid.uuid4().hex}"
    source, store = LocalStore(whole), open_store(uri)
    for key in source.sizes():
        store.create(key, source.get(key))
    return uri


@pytest.mark.parametrize("variable", ["AWS_NO_SIGN_REQUEST", "AWS_SKIP_SIGNATURE"])
def test_a_public_bucket_is_read_without_credentials(
    s3_server: str, whole: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    public, private = copied(whole, "public"), copied(whole, "statehouse")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv(variable, "true")
    read_all(public)
    with pytest.raises(StoreError, match="refused these credentials"):
        open_dataset(private)


def test_a_bucket_is_named_by_its_host(s3_server: str, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Virtual-host style. The server is its own HTTP proxy here, since not every machine resolves <bucket>.localhost."""
    uri = copied(whole, "statehouse")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://localhost:{s3_server.rsplit(':', 1)[1]}")
    monkeypatch.setenv("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "true")
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, s3_server)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    read_all(uri)
    open_store(uri).probe()


FURTHER = os.environ.get("STATEHOUSE_TEST_URIS", "").split()


@pytest.mark.skipif(
    not FURTHER, reason="STATEHOUSE_TEST_URIS names no further stores, as az://container/tests or gs://bucket/tests"
)
@pytest.mark.parametrize("place", FURTHER)
def test_a_dataset_lives_in_further_stores(place: str) -> None:
    """Probe, plan, fill, seal, read, verify. Credentials and emulators from the environment, as for the library."""
    uri = f"{place}/{uuid.uuid4().hex}"
    open_store(uri).probe()
    sealed(uri, sequences(12, 200))
    read_all(uri)
    assert verify(open_store(uri), full=True).ok
    assert find_datasets(place).count(uri) == 1
