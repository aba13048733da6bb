"""What the fault tests share: kinds of objects and of damage, a tally of what was tried, a proxy that loses responses."""

from __future__ import annotations

import re
import socket
import threading
from collections import Counter
from collections.abc import Callable

# (damage, kind of object or step, how it ended) -> times. Printed at the end of the run by conftest.py.
TRIED: Counter[tuple[str, str, str]] = Counter()

KINDS = {
    "plan": r"plan\.json",
    "seal": r"seal(-\d+)?\.json",
    "table of receipts": r"shards(-\d+)?\.parquet",
    "sequences": r"sequences\.parquet",
    "tokens": r"(tokens|loss_mask)/c/\d+",
    "zarr metadata": r"(.*/)?zarr\.json",
    "offsets": r"exponent_offset/c/0/0",
    "copy of a receipt": r"receipts/\d+\.json",
    "shard": r"hidden/c/0/\d+/0/0",
}


def kind_of(key: str) -> str:
    return next(kind for kind, pattern in KINDS.items() if re.fullmatch(pattern, key))


def part_of_shard(at: int, size: int, data_bytes: int, index_bytes: int) -> str:
    """Which part of a shard object a byte lies in."""
    if at < data_bytes:
        return "shard: data"
    if at < size - index_bytes - 12:
        return "shard: receipt"
    return "shard: trailer" if at < size - index_bytes else "shard: index"


def names_what_to_do(message: str) -> bool:
    """A named object or folder, and a command or an action."""
    return bool(
        re.search(r"`(statehouse|python -m ray_jobs)", message) or re.search(r"restore|run |delete|check", message)
    )


def summary() -> list[str]:
    """One line a kind of fault: how often it was tried and how it ended."""
    rows: dict[tuple[str, str], Counter[str]] = {}
    for (damage, kind, end), times in TRIED.items():
        rows.setdefault((damage, kind), Counter())[end] += times
    lines = []
    for (damage, kind), ends in sorted(rows.items()):
        told = ", ".join(f"{times} {end}" for end, times in sorted(ends.items()))
        lines.append(f"{damage:<28} {kind:<22} {sum(ends.values()):>5} tried: {told}")
    total = sum(TRIED.values())
    wrong = sum(times for (_, _, end), times in TRIED.items() if end == "WRONG NUMBERS")
    return [*lines, f"{total} faults tried, {wrong} wrong numbers"] if total else []


class LossyProxy:
    """A TCP proxy in front of an S3 server that swallows the responses of chosen requests and cuts the connection.

    lose(request line) says which, each at most once: the server has done the work, and the client cannot know.
    """

    def __init__(self, endpoint: str, lose: Callable[[str], bool]) -> None:
        host, port = endpoint.removeprefix("http://").split(":")
        self._server = (host, int(port))
        self._lose = lose
        self.requests: list[str] = []
        self.lost: list[str] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, socket.create_connection(self._server) as server:
            while True:
                request = _message(client)
                if not request:
                    return
                line = request.split(b"\r\n", 1)[0].decode()
                self.requests.append(line)
                lose = line not in self.lost and self._lose(line)
                server.sendall(request)
                response = _message(server, head=line.startswith("HEAD"))
                if lose:
                    self.lost.append(line)
                    return  # done there, unknown here
                client.sendall(response)


def _message(source: socket.socket, head: bool = False) -> bytes:
    """One whole HTTP/1.1 message (headers, and a body with Content-Length or chunks), or b"" at the end."""
    data = b""
    while b"\r\n\r\n" not in data:
        part = source.recv(65536)
        if not part:
            return b""
        data += part
    top, body = data.split(b"\r\n\r\n", 1)
    headers = top.lower()
    if head or b" 204 " in top.split(b"\r\n", 1)[0] or b" 304 " in top.split(b"\r\n", 1)[0]:
        return data
    if found := re.search(rb"content-length:\s*(\d+)", headers):
        length = int(found.group(1))
        while len(body) < length:
            if not (part := source.recv(65536)):
                return b""
            body += part
    elif b"transfer-encoding: chunked" in headers:
        while not body.endswith(b"0\r\n\r\n"):
            if not (part := source.recv(65536)):
                return b""
            body += part
    return top + b"\r\n\r\n" + body
