"""Objects at a URI: one small interface over a folder and over every store that obstore names (S3, GCS, Azure, ...).

The invariant everything else rests on is `create`: it stores an object whole or not at all, and never over another one.
Folders get it from temp file, fsync, `link(2)` (which fails if the name is taken), unlink, fsync of the folder; object
stores from a conditional PUT. `probe` refuses stores that do not honour it.

Credentials come from the environment or the store's usual chain, never from a recipe, and never appear in an error.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import unquote, urlparse

from storage.errors import StoreError

_TEMPORARY = ".tmp-"
_DENIED = {"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken"}


class ObjectMissing(StoreError):
    """No object at this key."""


class _EmptyObject(StoreError):
    """A range was asked of an object of zero bytes."""


class ObjectStore(ABC):
    """Keys are relative, with `/` between their parts. Safe to share between threads."""

    uri: str

    @abstractmethod
    def get(self, key: str) -> bytes:
        """The whole object. Raises ObjectMissing."""

    @abstractmethod
    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Up to `length` bytes from `start`; fewer only at the object's end. Raises ObjectMissing."""

    @abstractmethod
    def get_tail(self, key: str, length: int) -> tuple[bytes, int]:
        """The last `length` bytes (or all there are) and the object's size. Raises ObjectMissing."""

    @abstractmethod
    def create(self, key: str, data: bytes) -> bool:
        """Stores the object if the key is free, and says whether it was. Atomic and durable."""

    @abstractmethod
    def put(self, key: str, data: bytes) -> None:
        """Stores the object over whatever is there. Atomic. Only for what can be rebuilt."""

    @abstractmethod
    def sizes(self, prefix: str = "") -> dict[str, int]:
        """{key: bytes} of all objects under the folder `prefix` ("" for all)."""

    @abstractmethod
    def folders(self, prefix: str = "") -> list[str]:
        """Names of the folders directly under `prefix`."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Removes the object; no error if there is none."""

    def exists(self, key: str) -> bool:
        try:
            self.get_range(key, 0, 1)
        except _EmptyObject:
            return True
        except ObjectMissing:
            return False
        return True

    def probe(self) -> None:
        """Creates one key twice. Raises StoreError when the store cannot be written to or lets the second one through."""
        self.folders()  # some servers make a missing bucket at the first PUT; a list says that it is not there
        key = f"probe-{uuid.uuid4().hex}"
        first = self.create(key, b"1")
        second = self.create(key, b"2")
        kept = self.get(key)
        self.delete(key)
        if not first or second or kept != b"1":
            raise StoreError(
                f"{self.uri}: the store let a second create-only PUT replace the first, so writers could overwrite each "
                "other; use a store that honours If-None-Match (AWS S3, MinIO, SeaweedFS, GCS, Azure do)"
            )


class LocalStore(ObjectStore):
    """A folder of a POSIX file system."""

    def __init__(self, path: str | Path) -> None:
        self.root = Path(path).expanduser().absolute()
        self.uri = str(self.root)

    def _path(self, key: str) -> Path:
        return self.root / key if key else self.root

    def _fail(self, error: OSError, key: str) -> NoReturn:
        where = self._path(key)
        if isinstance(error, (FileNotFoundError, IsADirectoryError)):
            raise ObjectMissing(f"{where}: no such object") from None
        reason = os.strerror(error.errno) if error.errno else str(error)
        fix = {
            errno.ENOSPC: "free some space or choose another dataset.uri",
            errno.EDQUOT: "raise the quota or choose another dataset.uri",
            errno.EACCES: "give this user the right to it or choose another dataset.uri",
            errno.EROFS: "choose a dataset.uri on a writable file system",
        }.get(error.errno or 0, "check that dataset.uri names a folder on a POSIX file system")
        raise StoreError(f"{where}: {reason}; {fix}") from None

    def get(self, key: str) -> bytes:
        try:
            return self._path(key).read_bytes()
        except OSError as error:
            self._fail(error, key)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        try:
            with open(self._path(key), "rb", buffering=0) as file:
                file.seek(start)
                return _read_up_to(file.fileno(), length)
        except OSError as error:
            self._fail(error, key)

    def get_tail(self, key: str, length: int) -> tuple[bytes, int]:
        try:
            with open(self._path(key), "rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(max(0, size - length))
                return _read_up_to(file.fileno(), min(length, size)), size
        except OSError as error:
            self._fail(error, key)

    @contextlib.contextmanager
    def _temporary(self, key: str, data: bytes) -> Iterator[tuple[Path, Path]]:
        path = self._path(key)
        temporary = path.with_name(f"{_TEMPORARY}{uuid.uuid4().hex}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with open(temporary, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                yield temporary, path
            finally:
                temporary.unlink(missing_ok=True)
            for folder in (path.parent, *path.parent.parents):  # the folders may be new, too
                descriptor = os.open(folder, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
                if folder in (self.root, self.root.parent):
                    break
        except OSError as error:
            self._fail(error, key)

    def create(self, key: str, data: bytes) -> bool:
        with self._temporary(key, data) as (temporary, path):
            try:
                os.link(temporary, path)
            except FileExistsError:
                return False
        return True

    def put(self, key: str, data: bytes) -> None:
        with self._temporary(key, data) as (temporary, path):
            os.replace(temporary, path)

    def sizes(self, prefix: str = "") -> dict[str, int]:
        found: dict[str, int] = {}
        top = self._path(prefix)
        for folder, _, names in os.walk(top):
            for name in names:
                if not name.startswith(_TEMPORARY):
                    path = Path(folder, name)
                    with contextlib.suppress(FileNotFoundError):
                        found[path.relative_to(self.root).as_posix()] = path.stat().st_size
        return found

    def folders(self, prefix: str = "") -> list[str]:
        top = self._path(prefix)
        return sorted(path.name for path in top.iterdir() if path.is_dir()) if top.is_dir() else []

    def delete(self, key: str) -> None:
        try:
            self._path(key).unlink(missing_ok=True)
        except OSError as error:
            self._fail(error, key)


def _read_up_to(descriptor: int, length: int) -> bytes:
    parts = []
    while length > 0 and (part := os.read(descriptor, length)):
        parts.append(part)
        length -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


class RemoteStore(ObjectStore):
    """Anything that obstore can open: s3://, gs://, az://, https://."""

    def __init__(self, uri: str) -> None:
        import obstore
        from obstore.exceptions import BaseError
        from obstore.store import from_url

        open_url: Any = from_url  # its overloads know no store chosen at run time

        self.uri = uri.rstrip("/")
        self._obstore = obstore
        options: dict[str, Any] = {"timeout": timedelta(seconds=120), "connect_timeout": timedelta(seconds=10)}
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
        config: dict[str, Any] = {}
        if uri.startswith("s3") and endpoint:
            config["endpoint"] = endpoint
            options["allow_http"] = endpoint.startswith("http://")
        retry = {
            "max_retries": 6,
            "retry_timeout": timedelta(seconds=60),
            "backoff": {"init_backoff": timedelta(milliseconds=200), "max_backoff": timedelta(seconds=10), "base": 2},
        }
        try:
            self._store: Any = open_url(
                self.uri,
                config=config or None,
                client_options=options,
                retry_config=retry,
            )
        except (BaseError, ValueError) as error:
            raise StoreError(f"{uri}: cannot be opened as an object store: {_first_line(error)}") from None

    @contextlib.contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        from obstore import exceptions

        where = f"{self.uri}/{key}" if key else self.uri
        try:
            yield
        except (exceptions.AlreadyExistsError, FileExistsError):
            raise
        except (exceptions.BaseError, OSError) as error:
            # obstore's classes differ between GET and LIST for the same refusal; the server's code does not.
            code = _s3_code(error)
            if code == "NoSuchBucket":
                bucket = urlparse(self.uri).netloc
                raise StoreError(f"{self.uri}: there is no bucket {bucket!r}; create it or correct the URI") from None
            if isinstance(error, (exceptions.NotFoundError, FileNotFoundError)):
                raise ObjectMissing(f"{where}: no such object") from None
            denied = (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)
            if code == "InvalidRange":
                raise _EmptyObject(f"{where}: empty") from None
            # 169.254.169.254 is where a cloud machine gets its credentials: asked last, when there are none.
            if code in _DENIED or isinstance(error, denied) or "169.254.169.254" in str(error):
                raise StoreError(
                    f"{self.uri}: the store refused these credentials ({code or 'access denied'}); "
                    + (
                        "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and AWS_ENDPOINT_URL for other servers than AWS)"
                        if self.uri.startswith("s3")
                        else "set the credentials that this kind of store reads from the environment"
                    )
                ) from None
            raise StoreError(
                f"{where}: the store failed ({code or _first_line(error)}); "
                "check AWS_ENDPOINT_URL and that the server is up, then run the same command again"
            ) from None

    def get(self, key: str) -> bytes:
        with self._errors(key):
            return bytes(self._obstore.get(self._store, key).bytes())

    def get_range(self, key: str, start: int, length: int) -> bytes:
        if length == 0:
            return b""
        with self._errors(key):
            return bytes(self._obstore.get_range(self._store, key, start=start, length=length))

    def get_tail(self, key: str, length: int) -> tuple[bytes, int]:
        try:
            with self._errors(key):
                result = self._obstore.get(self._store, key, options={"range": {"suffix": length}})
                return bytes(result.bytes()), result.meta["size"]
        except _EmptyObject:
            return b"", 0

    def create(self, key: str, data: bytes) -> bool:
        from obstore.exceptions import AlreadyExistsError

        try:
            with self._errors(key):
                self._obstore.put(self._store, key, data, mode="create", use_multipart=False)
        except AlreadyExistsError:
            return False
        return True

    def put(self, key: str, data: bytes) -> None:
        with self._errors(key):
            self._obstore.put(self._store, key, data)

    def sizes(self, prefix: str = "") -> dict[str, int]:
        with self._errors(""):
            pages = self._obstore.list(self._store, prefix=prefix or None)
            return {entry["path"]: entry["size"] for page in pages for entry in page}

    def folders(self, prefix: str = "") -> list[str]:
        with self._errors(""):
            found = self._obstore.list_with_delimiter(self._store, prefix=prefix or None)
            return sorted(path.rstrip("/").rsplit("/", 1)[-1] for path in found["common_prefixes"])

    def delete(self, key: str) -> None:
        with contextlib.suppress(ObjectMissing), self._errors(key):
            self._obstore.delete(self._store, key)


def _s3_code(error: BaseException) -> str | None:
    """The server's own error code (NoSuchBucket, InvalidAccessKeyId, ...), which holds no secret; its message might."""
    found = re.search(r"<Code>(\w+)</Code>", str(error))
    return found.group(1) if found else None


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__


def open_store(uri: str | Path) -> ObjectStore:
    """The store at a folder, `file://` or object-store URI. Opens nothing: errors come with the first request."""
    text = str(uri)
    if "\0" in text or re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/(?!/)", text):
        raise StoreError(f"{text!r}: no URI; expected a folder or scheme://bucket/path such as s3://bucket/datasets/x")
    if "://" not in text:
        return LocalStore(text)
    scheme, rest = text.split("://", 1)
    if scheme.lower() != "file":
        return RemoteStore(f"{scheme.lower()}://{rest}")
    if not rest.startswith("/"):
        raise StoreError(
            f"{text}: a file URI has three slashes, as in file:///data/x; a relative folder is given without"
        )
    return LocalStore(unquote(rest))
