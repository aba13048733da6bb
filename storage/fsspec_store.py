"""Objects of anything else that fsspec opens (memory://, sftp://, zip://, hf://, ...): to be read, not written.

Create-only PUTs are what writing rests on, and fsspec has none that hold everywhere.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, NoReturn, TypeVar

from storage.errors import StoreError
from storage.object_store import EmptyObject, ObjectMissing, ObjectStore, Tail

Result = TypeVar("Result")


class FsspecStore(ObjectStore):
    """A folder of a fsspec file system. Without tags: a shard that is replaced while it is read is not noticed."""

    def __init__(self, uri: str) -> None:
        self.uri = uri.rstrip("/")
        try:
            from fsspec.core import url_to_fs

            fs, root = url_to_fs(uri)
        except (ImportError, ValueError) as error:
            raise StoreError(f"{uri}: cannot be opened: {_line(error)}; install what this kind of URI needs") from None
        except Exception as error:  # a connection that fails, of whatever library
            raise StoreError(f"{uri}: cannot be opened: {_line(error)}; check the URI and its server") from None
        self._fs: Any = fs
        # Those that are not made for it share one file or connection between threads (tar://, ftp://).
        self._one: Any = contextlib.nullcontext() if getattr(fs, "async_impl", False) else threading.RLock()
        fs.invalidate_cache()  # fsspec hands out the same object again, with the lists of before
        self._root = str(root).rstrip("/")

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}" if key else self._root

    def _do(self, key: str, request: Callable[[str], Result]) -> Result:
        where = f"{self.uri}/{key}" if key else self.uri
        try:
            with self._one:
                return request(self._path(key))
        except (FileNotFoundError, IsADirectoryError, KeyError):  # KeyError: no such member of an archive
            raise ObjectMissing(f"{where}: no such object") from None
        except StoreError:
            raise
        except Exception as error:  # of whatever library is behind
            raise StoreError(f"{where}: the store failed ({_line(error)}); run the same command again") from None

    def get(self, key: str) -> bytes:
        return bytes(self._do(key, self._fs.cat_file))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        if not length:
            return b""

        def part(path: str) -> bytes:
            found = bytes(self._fs.cat_file(path, start=start, end=start + length))
            if not found and not self._fs.info(path)["size"]:
                raise EmptyObject(f"{self.uri}/{key}: empty")
            return found

        return self._do(key, part)

    def get_view(self, key: str, start: int, length: int, tag: str | None = None) -> memoryview:
        return memoryview(self.get_range(key, start, length))

    def get_tail(self, key: str, length: int) -> Tail:
        def tail(path: str) -> Tail:
            size = int(self._fs.info(path)["size"])
            data = bytes(self._fs.cat_file(path, start=max(0, size - length), end=size)) if size else b""
            return Tail(data, size, None)

        return self._do(key, tail)

    def sizes(self, prefix: str = "") -> dict[str, int]:
        return {key: int(about["size"]) for key, about in self._found(prefix).items()}

    def written(self) -> dict[str, tuple[int, datetime]]:
        unknown = datetime.now(UTC)  # so that nothing looks old

        def when(about: dict[str, Any]) -> datetime:
            time = about.get("mtime") or about.get("created")
            return time if isinstance(time, datetime) else unknown

        return {key: (int(about["size"]), when(about)) for key, about in self._found().items()}

    def _found(self, prefix: str = "") -> dict[str, dict[str, Any]]:
        def files(path: str) -> dict[str, dict[str, Any]]:
            found: dict[str, dict[str, Any]] = self._fs.find(path, detail=True)
            return found

        try:
            listed = self._do(prefix, files)
        except ObjectMissing:
            return {}
        root = str(self._fs._strip_protocol(self._root)).rstrip("/")
        return {str(path)[len(root) :].lstrip("/"): about for path, about in listed.items()}

    def folders(self, prefix: str = "") -> list[str]:
        try:
            listed: list[dict[str, Any]] = self._do(prefix, lambda path: self._fs.ls(path, detail=True))
        except ObjectMissing:
            return []
        return sorted(str(one["name"]).rstrip("/").rsplit("/", 1)[-1] for one in listed if one["type"] == "directory")

    def create(self, key: str, data: bytes | memoryview) -> bool:
        self._refuse()

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._refuse()

    def delete(self, key: str) -> None:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise StoreError(
            f"{self.uri}: can be read but not written to: only folders, s3://, gs:// and az:// have the create-only PUT that "
            "writers need; choose one of those, or copy the dataset there with `statehouse cp`"
        )


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
