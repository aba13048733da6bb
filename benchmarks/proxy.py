"""An HTTP proxy in front of an object store that is slow, far away, or broken on purpose.

    python -m benchmarks.proxy 127.0.0.1:8333 --bandwidth 200e6          # bytes/s, all connections together
    python -m benchmarks.proxy 127.0.0.1:8333 --delay 0.03               # seconds before every request is passed on
    python -m benchmarks.proxy 127.0.0.1:8333 --fault half --times 2     # the first two GETs of every object break off

It prints the port it listens on and runs until it is killed. Requests are passed on as they came, `Host` included, so
signatures stay valid. One thread serves one connection, one request after the other (HTTP/1.1, as S3 clients speak it).
"""

from __future__ import annotations

import argparse
import contextlib
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

_CHUNK = 1 << 18
FAULTS = {
    "503": "answers 503 SlowDown; the store never sees the request",
    "500": "answers 500 InternalError; the store never sees the request",
    "403": "answers 403 ExpiredToken, as when temporary credentials run out; the store never sees the request",
    "reset": "resets the connection before the request is passed on",
    "half": "passes on the head and half of the body, then resets the connection",
    "short": "passes on half of the body under a length that says it is whole",
    "flip": "passes on a body with one byte in the middle changed",
    "stall": "passes on half of the body, then nothing more",
    "lost": "passes the request on and resets the connection instead of answering",
}


_REFUSALS = {
    "503": ("SlowDown", "Slow Down"),
    "500": ("InternalError", "Internal Server Error"),
    "403": ("ExpiredToken", "Forbidden"),
}


@dataclass(frozen=True)
class Fault:
    """Strikes the first `times` requests of every object that fits; `times` < 0 strikes always."""

    kind: str
    times: int = 1
    method: str = "GET"
    path: str = ""

    def __post_init__(self) -> None:
        if self.kind not in FAULTS:
            raise ValueError(f"fault {self.kind!r} is unknown; expected one of {', '.join(FAULTS)}")


class Bucket:
    """Lets `rate` bytes a second through, shared by all connections."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._free_at = 0.0
        self._lock = threading.Lock()

    def spend(self, count: int) -> None:
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now - 0.005) + count / self.rate  # a burst of 5 ms at most
            wait = self._free_at - now
        if wait > 0.0005:
            time.sleep(wait)


class Proxy:
    """Listens on a free port of 127.0.0.1 until `close`. `counts`: requests by method, and faults by kind."""

    def __init__(
        self, target: tuple[str, int], *, bandwidth: float | None = None, delay: float = 0.0, fault: Fault | None = None
    ) -> None:
        self.target, self.delay, self.fault = target, delay, fault
        self.counts: Counter[str] = Counter()
        self._bucket = Bucket(bandwidth) if bandwidth else None
        self._tries: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError, _Closed):
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with socket.create_connection(self.target) as server:
                server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                from_client, from_server = _Stream(client), _Stream(server)
                while self._request(from_client, from_server):
                    pass

    def _strike(self, method: str, path: str) -> str | None:
        fault = self.fault
        with self._lock:
            self.counts[method] += 1
            if fault is None or method != fault.method or not re.search(fault.path, path):
                return None
            key = (method, path)
            self._tries[key] += 1
            if 0 <= fault.times < self._tries[key]:
                return None
            self.counts[fault.kind] += 1
            return fault.kind

    def _request(self, client: _Stream, server: _Stream) -> bool:
        """One request and its answer. False when the connection is at its end."""
        head = client.head()
        if not head:
            return False
        method, path = (part.decode("latin-1") for part in head.split(b" ", 2)[:2])
        kind = self._strike(method, path.split("?")[0])
        if kind == "reset":
            return _reset(client.socket)
        if self.delay:
            time.sleep(self.delay)
        if kind in _REFUSALS:
            for _ in client.body(head):
                pass
            code, reason = _REFUSALS[kind]
            body = f"<Error><Code>{code}</Code><Message>{reason}</Message></Error>".encode()
            client.socket.sendall(f"HTTP/1.1 {kind} {reason}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
            return True
        server.socket.sendall(head)
        for part in client.body(head):
            self._spend(len(part))
            server.socket.sendall(part)
        answer = server.head()
        if not answer:
            return False
        if kind == "lost":
            for _ in server.body(answer, method):
                pass
            return _reset(client.socket)
        if kind in ("half", "short", "stall", "flip"):
            body = b"".join(bytes(part) for part in server.body(answer, method))
            half = body[: len(body) // 2]
            if kind == "short":
                answer = re.sub(rb"(?im)^content-length:.*?\r\n", f"Content-Length: {len(half)}\r\n".encode(), answer)
            if kind == "flip" and body:
                half = half + bytes([body[len(half)] ^ 0x40]) + body[len(half) + 1 :]
            client.socket.sendall(answer + half)
            if kind == "stall":
                client.socket.settimeout(600)
                client.socket.recv(1)
                return False
            return kind != "half" or _reset(client.socket)
        client.socket.sendall(answer)
        for part in server.body(answer, method):
            self._spend(len(part))
            client.socket.sendall(part)
        return True

    def _spend(self, count: int) -> None:
        if self._bucket:
            self._bucket.spend(count)


class _Closed(Exception):
    pass


class _Stream:
    """What has been read from a socket and not been used yet."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._rest = b""
        self._memory = memoryview(bytearray(_CHUNK))

    def head(self) -> bytes:
        """Up to and with the empty line; b"" at the end of the connection."""
        while b"\r\n\r\n" not in self._rest:
            more = self.socket.recv(1 << 16)
            if not more:
                return b""
            self._rest += more
        head, self._rest = self._rest.split(b"\r\n\r\n", 1)
        return head + b"\r\n\r\n"

    def body(self, head: bytes, method: str = "") -> Iterator[bytes | memoryview]:
        """The body that belongs to a head, as it comes; `method` is that of the request, for an answer."""
        status = head[9:12] if head.startswith(b"HTTP/") else b""
        if method == "HEAD" or status in (b"204", b"304"):
            return
        if re.search(rb"(?im)^transfer-encoding:\s*chunked", head):
            yield from self._chunked()
        elif found := re.search(rb"(?im)^content-length:\s*(\d+)", head):
            yield from self._exactly(int(found.group(1)))

    def _exactly(self, count: int) -> Iterator[bytes | memoryview]:
        if self._rest:
            part, self._rest = self._rest[:count], self._rest[count:]
            count -= len(part)
            yield part
        while count:
            got = self.socket.recv_into(self._memory, min(count, _CHUNK))
            if not got:
                raise _Closed
            count -= got
            yield self._memory[:got]

    def _chunked(self) -> Iterator[bytes | memoryview]:
        while True:
            while b"\r\n" not in self._rest:
                more = self.socket.recv(1 << 16)
                if not more:
                    raise _Closed
                self._rest += more
            line, self._rest = self._rest.split(b"\r\n", 1)
            yield line + b"\r\n"
            size = int(line.split(b";")[0], 16)
            yield from self._exactly(size + 2)
            if not size:
                return


def _reset(connection: socket.socket) -> bool:
    """RST instead of FIN, as a server that dies does."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
    return False


@contextlib.contextmanager
def proxy_process(endpoint: str, *, bandwidth: float | None = None, delay: float = 0.0) -> Iterator[str]:
    """The endpoint of a proxy in a process of its own, so that its work is not counted as the reader's."""
    command = [sys.executable, "-m", "benchmarks.proxy", endpoint.split("//")[-1], "--delay", str(delay)]
    if bandwidth:
        command += ["--bandwidth", str(bandwidth)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="HOST:PORT of the store")
    parser.add_argument("--bandwidth", type=float, help="bytes/s")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds added to every request")
    parser.add_argument("--fault", choices=FAULTS)
    parser.add_argument("--times", type=int, default=1, help="requests of each object that fail (default 1; -1: all)")
    args = parser.parse_args()
    host, port = args.target.rsplit(":", 1)
    fault = Fault(args.fault, args.times) if args.fault else None
    proxy = Proxy((host, int(port)), bandwidth=args.bandwidth, delay=args.delay, fault=fault)
    print(proxy.port, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
