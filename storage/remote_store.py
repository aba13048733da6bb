"""Objects of anything that obstore can open: s3://, gs://, az://, https://.

Credentials come from the environment or the store's usual chain, never from a recipe, and never appear in an error.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, TypeVar
from urllib.parse import urlparse

from storage.errors import StoreError, StoreRefused
from storage.object_store import CannotList, EmptyObject, ObjectChanged, ObjectMissing, ObjectStore, Tail

Result = TypeVar("Result")
_BROKEN = ("response body error", "invalid list response")
_BROKEN_PUT = (*_BROKEN, "error sending request")
_BACKOFF = (0.2, 0.5, 1.0)  # seconds between our tries
_MAX_RETRIES = 6  # by obstore, within each of them
_DENIED = {"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken"}


class _BrokenOff(StoreError):
    """An answer broke off or stalled where obstore does not try again."""


class RemoteStore(ObjectStore):
    """Anything that obstore can open: s3://, gs://, az://, https://."""

    def __init__(self, uri: str, *, timeout_s: float = 120.0) -> None:
        """timeout_s: of one request, its body included; it is then tried again, as after a 5xx or a reset."""
        import obstore
        from obstore.exceptions import BaseError
        from obstore.store import from_url

        open_url: Any = from_url  # its overloads know no store chosen at run time

        self.uri = uri.rstrip("/")
        self._obstore = obstore
        options: dict[str, Any] = {"timeout": timedelta(seconds=timeout_s), "connect_timeout": timedelta(seconds=10)}
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
        config: dict[str, Any] = {}
        if uri.startswith(("http://", "gs://")):  # Google's is https unless the credentials name another server
            options["allow_http"] = True
        if uri.startswith("s3") and endpoint:
            if _true("AWS_VIRTUAL_HOSTED_STYLE_REQUEST"):  # obstore wants the bucket in the endpoint's name then
                endpoint = _with_bucket(endpoint, urlparse(uri).netloc)
            config["endpoint"] = endpoint
            options["allow_http"] = endpoint.startswith("http://")
        if uri.startswith("s3") and _true("AWS_NO_SIGN_REQUEST"):
            config["skip_signature"] = True
        retry = {
            "max_retries": _MAX_RETRIES,
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

    def _do(self, key: str, request: Callable[[], Result], *, put: bool = False) -> Result:
        """Makes a request. obstore retries 5xx, refused and reset connections, and bodies that break off, with backoff;
        not create-only PUTs whose connection is reset, nor answers whose error text breaks off (a 404, a list): those
        are tried again here."""
        for wait in _BACKOFF:
            try:
                return self._named(key, request, put)
            except _BrokenOff:
                time.sleep(wait)
        return self._named(key, request, put)

    def _named(self, key: str, request: Callable[[], Result], put: bool) -> Result:
        """One request, its errors as ours."""
        from obstore import exceptions

        where = f"{self.uri}/{key}" if key else self.uri
        try:
            return request()
        except (exceptions.AlreadyExistsError, FileExistsError):
            raise
        except (exceptions.BaseError, OSError) as error:
            # obstore's classes differ between GET and LIST for the same refusal; the server's code does not.
            code = _s3_code(error)
            if code in ("NoSuchBucket", "ContainerNotFound"):
                bucket = urlparse(self.uri).netloc
                raise StoreRefused(f"{self.uri}: there is no bucket {bucket!r}; create it or correct the URI") from None
            if isinstance(error, (exceptions.NotFoundError, FileNotFoundError)):
                raise ObjectMissing(f"{where}: no such object") from None
            denied = (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)
            if code == "InvalidRange":
                raise EmptyObject(f"{where}: empty") from None
            # 169.254.169.254 is where a cloud machine gets its credentials: asked last, when there are none.
            if code in _DENIED or isinstance(error, denied) or "169.254.169.254" in str(error):
                raise StoreRefused(
                    f"{self.uri}: the store refused these credentials ({code or 'access denied'}); "
                    + (
                        "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and AWS_ENDPOINT_URL for other servers than AWS)"
                        if self.uri.startswith("s3")
                        else "set the credentials that this kind of store reads from the environment"
                    )
                ) from None
            broken_off = any(text in str(error) for text in (_BROKEN_PUT if put else _BROKEN))
            raise (_BrokenOff if broken_off else StoreError)(
                f"{where}: the store failed ({code or _first_line(error)}); "
                f"check {'AWS_ENDPOINT_URL' if self.uri.startswith('s3') else 'the URI'} and that the server is up, then run the "
                "same command again"
            ) from None

    def get(self, key: str) -> bytes:
        return self._do(key, lambda: bytes(self._obstore.get(self._store, key).bytes()))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return bytes(self.get_view(key, start, length))

    def get_view(self, key: str, start: int, length: int, tag: str | None = None) -> memoryview:
        if length == 0:
            return memoryview(b"")
        if tag is None:
            return self._do(
                key, lambda: memoryview(self._obstore.get_range(self._store, key, start=start, length=length))
            )

        def tagged() -> memoryview:
            # The answer's own ETag is compared: unlike If-Match, every store and every proxy gives it.
            result = self._obstore.get(self._store, key, options={"range": (start, start + length)})
            if result.meta["e_tag"] != tag:
                raise ObjectChanged(f"{self.uri}/{key}: replaced while it was read")
            return memoryview(result.bytes())

        return self._do(key, tagged)

    def get_tail(self, key: str, length: int) -> Tail:
        from obstore.exceptions import NotSupportedError

        def tail() -> Tail:
            try:
                result = self._obstore.get(self._store, key, options={"range": {"suffix": length}})
            except NotSupportedError:  # Azure has no suffix ranges, so obstore refuses them
                about = self._obstore.head(self._store, key)
                size = about["size"]
                if not size:
                    return Tail(b"", 0, None)
                start = max(0, size - length)
                data = bytes(self._obstore.get_range(self._store, key, start=start, end=size))
                return Tail(data, size, about.get("e_tag"))
            return Tail(bytes(result.bytes()), result.meta["size"], result.meta.get("e_tag"))

        try:
            return self._do(key, tail)
        except EmptyObject:
            return Tail(b"", 0, None)

    def create(self, key: str, data: bytes | memoryview) -> bool:
        from obstore.exceptions import AlreadyExistsError

        try:
            # A try whose answer was lost may have stored it: the next one finds it there, and so does the caller.
            self._do(
                key, lambda: self._obstore.put(self._store, key, data, mode="create", use_multipart=False), put=True
            )
        except AlreadyExistsError:
            return False
        return True

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._do(key, lambda: self._obstore.put(self._store, key, data), put=True)

    def sizes(self, prefix: str = "") -> dict[str, int]:
        self._require_list()

        def sizes() -> dict[str, int]:
            pages = self._obstore.list(self._store, prefix=prefix or None)
            return {entry["path"]: entry["size"] for page in pages for entry in page}

        return self._do("", sizes)

    def _require_list(self) -> None:
        if self.uri.startswith("http"):
            raise CannotList(
                f"{self.uri}: a web server cannot be listed, so a dataset can be read there and nothing else; give the URI of "
                "the dataset itself, or of another copy"
            )

    def written(self) -> dict[str, tuple[int, datetime]]:
        self._require_list()

        def written() -> dict[str, tuple[int, datetime]]:
            pages = self._obstore.list(self._store)
            return {entry["path"]: (entry["size"], entry["last_modified"]) for page in pages for entry in page}

        return self._do("", written)

    def folders(self, prefix: str = "") -> list[str]:
        self._require_list()
        found = self._do("", lambda: self._obstore.list_with_delimiter(self._store, prefix=prefix or None))
        return sorted(path.rstrip("/").rsplit("/", 1)[-1] for path in found["common_prefixes"])

    def delete(self, key: str) -> None:
        with contextlib.suppress(ObjectMissing):
            self._do(key, lambda: self._obstore.delete(self._store, key))


def _true(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in ("1", "true", "yes", "on")


def _with_bucket(endpoint: str, bucket: str) -> str:
    scheme, _, host = endpoint.partition("://")
    return endpoint if host.startswith(f"{bucket}.") else f"{scheme}://{bucket}.{host}"


def _s3_code(error: BaseException) -> str | None:
    """The server's own error code (NoSuchBucket, InvalidAccessKeyId, ...), which holds no secret; its message might."""
    found = re.search(r"<Code>(\w+)</Code>", str(error))
    return found.group(1) if found else None


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
