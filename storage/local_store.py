"""Objects as files of a folder on a POSIX file system."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

from storage.errors import StoreError
from storage.object_store import ObjectChanged, ObjectMissing, ObjectStore, Tail

_TEMPORARY = ".tmp-"
_local = threading.local()  # a thread's buffer for ranges of files


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

    def get_view(self, key: str, start: int, length: int, tag: str | None = None) -> memoryview:
        if getattr(_local, "memory", None) is None or len(_local.memory) < length:
            _local.memory = memoryview(bytearray(length))
        try:
            descriptor = os.open(self._path(key), os.O_RDONLY)
            try:
                if tag is not None and tag != _tag(os.fstat(descriptor)):
                    raise ObjectChanged(f"{self._path(key)}: replaced while it was read")
                got = 0
                while got < length and (more := os.preadv(descriptor, [_local.memory[got:length]], start + got)):
                    got += more
            finally:
                os.close(descriptor)
        except OSError as error:
            self._fail(error, key)
        return _local.memory[:got].toreadonly()

    def get_tail(self, key: str, length: int) -> Tail:
        try:
            with open(self._path(key), "rb", buffering=0) as file:
                about = os.fstat(file.fileno())
                file.seek(max(0, about.st_size - length))
                return Tail(_read_up_to(file.fileno(), min(length, about.st_size)), about.st_size, _tag(about))
        except OSError as error:
            self._fail(error, key)

    @contextlib.contextmanager
    def _temporary(self, key: str, data: bytes | memoryview) -> Iterator[tuple[Path, Path]]:
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

    def create(self, key: str, data: bytes | memoryview) -> bool:
        with self._temporary(key, data) as (temporary, path):
            try:
                os.link(temporary, path)
            except FileExistsError:
                return False
        return True

    def put(self, key: str, data: bytes | memoryview) -> None:
        with self._temporary(key, data) as (temporary, path):
            os.replace(temporary, path)

    def sizes(self, prefix: str = "") -> dict[str, int]:
        return {key: about.st_size for key, about in self._files(prefix) if not Path(key).name.startswith(_TEMPORARY)}

    def written(self) -> dict[str, tuple[int, datetime]]:
        return {key: (about.st_size, datetime.fromtimestamp(about.st_mtime, UTC)) for key, about in self._files()}

    def _files(self, prefix: str = "") -> Iterator[tuple[str, os.stat_result]]:
        """Every file. A folder or file that cannot be looked at is a StoreError: what is left out would pass for missing."""

        def failed(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError):
                self._fail(error, str(error.filename or prefix))

        for folder, _, names in os.walk(self._path(prefix), onerror=failed):
            for name in names:
                path = Path(folder, name)
                key = path.relative_to(self.root).as_posix()
                try:
                    yield key, path.stat()
                except FileNotFoundError:
                    pass
                except OSError as error:
                    self._fail(error, key)

    def folders(self, prefix: str = "") -> list[str]:
        try:
            top = self._path(prefix)
            return sorted(path.name for path in top.iterdir() if path.is_dir()) if top.is_dir() else []
        except OSError as error:
            self._fail(error, prefix)

    def delete(self, key: str) -> None:
        try:
            self._path(key).unlink(missing_ok=True)
        except OSError as error:
            self._fail(error, key)


def _tag(about: os.stat_result) -> str:
    """A file is never written to once it has its name, so another content is another file.

    Two of them share a tag only if both came within one tick of the file system's clock (4 ms) and the inode was used again.
    """
    return f"{about.st_dev}-{about.st_ino}-{about.st_mtime_ns}-{about.st_size}"


def _read_up_to(descriptor: int, length: int) -> bytes:
    parts = []
    while length > 0 and (part := os.read(descriptor, length)):
        parts.append(part)
        length -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)
