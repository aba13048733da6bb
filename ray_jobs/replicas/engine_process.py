"""Owns the process that an sglang.Engine lives in: starts it, talks to it, knows when it is dead, cleans up.

Replicas on one machine keep apart by locks that the kernel releases when their owner dies: each holds its ports and a
private folder in shared memory, and each removes the folders of the dead when it starts.
"""

import contextlib
import fcntl
import itertools
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import IO, Any

from ray_jobs.replicas.replica import ReplicaConfig, parse_ports
from storage.errors import ReplicaFailed

HERE = Path(__file__).resolve().parent
ENGINE_PATH = HERE / "engine_path"
CPU_PATH = HERE / "cpu_path"


class EngineProcess:
    """Starts statehouse_engine.py, talks to it, and knows when it is dead."""

    def __init__(
        self,
        config: ReplicaConfig,
        arguments: Callable[[list[int]], dict[str, Any]],
        capture_layers: tuple[int, ...],
        teacher_topk: int = 0,
    ) -> None:
        """teacher_topk: ids and logits of each token's teacher summary; 0 for none."""
        self.config = config
        self._teacher_topk = teacher_topk
        self.info: dict[str, Any] = {}
        self.log_file = _new_log_file()
        self._folder_lock, self.private = _private_folder()
        self._ports: list[tuple[int, IO[str]]] = []
        self._numbers = itertools.count()
        self._waiting: dict[int, Future[dict[str, Any]]] = {}
        self._state = threading.Lock()  # guards _waiting and _dead
        self._writing = threading.Lock()
        self._dead: str | None = None
        self._stopping = False
        self._ready: Future[dict[str, Any]] = Future()
        self._process: subprocess.Popen[str] | None = None
        try:
            self._ports = _take_ports(config.ports, 2)
            self._launch(arguments([port for port, _ in self._ports]), capture_layers)
            self.info = self._await_ready()
        except BaseException:
            self.stop()
            raise
        self._folder_lock.write("\n".join(self.info["leftovers"]))  # for whoever finds the folder if we are killed
        self._folder_lock.flush()
        # what the engine accepts as prompt + response
        self.max_length = min(self.info["max_req_input_len"], self.info["max_total_num_tokens"] - 1)

    def _launch(self, arguments: dict[str, Any], capture_layers: tuple[int, ...]) -> None:
        read_end, write_end = os.pipe()
        with open(self.log_file, "wb") as out:
            self._process = subprocess.Popen(
                [sys.executable, str(ENGINE_PATH / "statehouse_engine.py"), str(write_end)],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                pass_fds=[write_end],
                env=self._environment(arguments, capture_layers),
                start_new_session=True,  # one group to kill, and no Ctrl-C of the caller's terminal
                text=True,
            )
        os.close(write_end)
        threading.Thread(target=self._receive, args=(os.fdopen(read_end),), daemon=True, name="engine-replies").start()
        self._send({"engine": arguments})

    def _environment(self, arguments: dict[str, Any], capture_layers: tuple[int, ...]) -> dict[str, str]:
        env = dict(os.environ)
        path = [str(ENGINE_PATH)]
        if self.config.gpus == 0:
            path.insert(0, str(CPU_PATH))
            env |= {
                "SGLANG_USE_CPU_ENGINE": "1",
                "CUDA_VISIBLE_DEVICES": "",
                "OMP_NUM_THREADS": str(self.config.threads),
                # Threads that spin while they wait for a core that is busy make a step 20 times slower.
                "OMP_WAIT_POLICY": "PASSIVE",
                "MKL_NUM_THREADS": str(self.config.threads),
                "TMPDIR": str(self.private),  # SGLang leaves its sockets behind
                "TORCH_COMPILE_DISABLE": "1",  # speculation has two tiny functions compiled, by g++, for most of a minute
            }
            ranks = int(arguments["tp_size"])
            if ranks > 1 and "SGLANG_CPU_OMP_THREADS_BIND" not in env:
                cores = sorted(os.sched_getaffinity(0))
                env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[r % len(cores)]) for r in range(ranks))
        if plugins := env.get("SGLANG_PLUGINS"):  # an allow list
            env["SGLANG_PLUGINS"] = f"{plugins},statehouse_capture"
        return env | {
            "PYTHONPATH": os.pathsep.join(path + [p for p in env.get("PYTHONPATH", "").split(os.pathsep) if p]),
            "STATEHOUSE_CAPTURE_DIR": str(self.private),
            "STATEHOUSE_CAPTURE_LAYERS": ",".join(map(str, capture_layers)),
            "STATEHOUSE_TEACHER_TOPK": str(self._teacher_topk),
            "HF_HUB_OFFLINE": "1",  # the verifier is a folder: nothing to fetch
            "SGLANG_PYSPY_DUMP_BEFORE_CRASH": env.get("SGLANG_PYSPY_DUMP_BEFORE_CRASH", "0"),  # a crash then takes 5 s
        }

    def _await_ready(self) -> dict[str, Any]:
        try:
            return self._ready.result(timeout=self.config.start_timeout_s)
        except TimeoutError:
            raise ReplicaFailed(
                f"SGLang did not start within {self.config.start_timeout_s:.0f} s; "
                f"raise extraction.replica.start_timeout_s, or read {self.log_file}\n{self._log_tail()}"
            ) from None

    # ---- requests ----

    def ask(
        self,
        requests: Sequence[tuple[list[int], dict[str, Any]]],
        prefix: str,
        *,
        capture: bool,
        heard: Callable[[int, dict[str, Any]], None] = lambda _at, _reply: None,
    ) -> list[dict[str, Any]]:
        """Send (token ids, sampling params) one by one, wait for all; replies in the order of the requests.

        heard(index, reply) is called as replies come. Raises ReplicaFailed as soon as the engine dies, or when no reply comes
        for request_timeout_s.
        """
        futures: list[Future[dict[str, Any]]] = []
        rids = []
        for ids, sampling in requests:
            number = next(self._numbers)
            future: Future[dict[str, Any]] = Future()
            rid = f"{prefix}{number}"
            futures.append(future)
            rids.append(rid)
            with self._state:
                if self._dead is not None:  # raised below, when those that came before have been heard
                    future.set_exception(ReplicaFailed(self._dead))
                    break
                self._waiting[number] = future
            self._send({"id": number, "rid": rid, "input_ids": ids, "sampling_params": sampling, "capture": capture})
        self._await(futures, rids, heard)
        replies = [future.result() for future in futures]
        for reply in replies:
            if "error" in reply:
                raise ReplicaFailed(f"SGLang refused a request: {reply['error']}; log {self.log_file}")
        return replies

    def _await(
        self,
        futures: Sequence[Future[dict[str, Any]]],
        rids: Sequence[str],
        heard: Callable[[int, dict[str, Any]], None],
    ) -> None:
        index = {future: at for at, future in enumerate(futures)}
        pending = set(futures)
        while pending:
            done, pending = wait(pending, timeout=self.config.request_timeout_s, return_when=FIRST_COMPLETED)
            if not done:
                late = [rid for future, rid in zip(futures, rids, strict=True) if future in pending]
                for rid in late:
                    self._send({"abort": rid})
                raise ReplicaFailed(
                    f"SGLang returned nothing for {self.config.request_timeout_s:.0f} s; {len(late)} requests waiting; "
                    f"raise extraction.replica.request_timeout_s, or read {self.log_file}\n"
                    f"{self._log_tail()}"
                )
            for future in done:
                if future.exception() is None and "error" not in future.result():
                    heard(index[future], future.result())
            for future in done:
                future.result()  # raises ReplicaFailed when the engine has died

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        # BrokenPipe: it died, which _receive tells every waiting request; ValueError: stop() closed the pipe.
        with self._writing, contextlib.suppress(BrokenPipeError, ValueError):
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()

    def _receive(self, replies: IO[str]) -> None:
        """Thread: hand replies to their futures until the pipe ends, then fail what still waits."""
        try:
            with replies:
                for line in replies:
                    if not line.endswith("\n"):
                        break  # the engine died within it
                    message = json.loads(line)
                    if "ready" in message:
                        self._ready.set_result(message["ready"])
                        continue
                    with self._state:
                        future = self._waiting.pop(message["id"], None)
                    if future is not None:
                        future.set_result(message)
        finally:
            self._die()

    def _die(self) -> None:
        process = self._process
        assert process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
        started = self._ready.done()
        reason = (
            f"the SGLang engine {'died' if started else 'failed to start'} (exit code {process.returncode}); "
            f"start the replica again; if it repeats, read {self.log_file}\n{self._log_tail()}"
        )
        if self._stopping:
            reason = "the replica was stopped"
        with self._state:
            self._dead = reason
            waiting, self._waiting = list(self._waiting.values()), {}
        for future in waiting:
            future.set_exception(ReplicaFailed(reason))
        if not started:
            self._ready.set_exception(ReplicaFailed(reason))

    def _log_tail(self, lines: int = 25) -> str:
        with contextlib.suppress(OSError):
            text = self.log_file.read_text(errors="replace").splitlines()
            return "\n".join(["  log tail:", *(f"    {line}" for line in text[-lines:])])
        return ""

    def scheduler_pids(self) -> list[int]:
        """Process ids of the engine's schedulers, for tests that kill them."""
        return list(self.info["scheduler_pids"])

    # ---- end ----

    def stop(self) -> None:
        self._stopping = True
        process = self._process
        if process is not None:
            with self._writing, contextlib.suppress(OSError, ValueError):
                assert process.stdin is not None
                process.stdin.close()  # it ends itself, with its children
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)
            _end_group(process.pid)
            process.wait()
        _remove(self.private, self.info.get("leftovers", []))
        self._folder_lock.close()
        for _, lock in self._ports:
            lock.close()


def _end_group(group: int, grace_s: float = 2.0) -> None:
    """Kill what is left of a process group, after a moment for multiprocessing's tracker to clean up behind it."""
    until = time.monotonic() + grace_s
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < until:
            os.killpg(group, 0)
            time.sleep(0.05)
        os.killpg(group, signal.SIGKILL)


# ---- folders, logs, ports ------------------------------------------------------------------------------------------


def _remove(folder: Path, leftovers: Sequence[str]) -> None:
    """A replica's private folder, and the files that SGLang left elsewhere in shared memory."""
    for path in leftovers:
        with contextlib.suppress(OSError):
            os.unlink(path)
    shutil.rmtree(folder, ignore_errors=True)


def _private_folder() -> tuple[IO[str], Path]:
    """A folder of our own in shared memory, with the lock that says it is in use; folders of the dead are removed."""
    root = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())
    for lock_path in root.glob("statehouse-*/owner.lock"):
        with contextlib.suppress(OSError), open(lock_path, "r+") as owner:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)  # only a dead owner's is free
            _remove(lock_path.parent, owner.read().split())
    folder = Path(tempfile.mkdtemp(prefix=".statehouse-", dir=root))
    lock = open(folder / "owner.lock", "w")  # noqa: SIM115 - held while the replica lives
    fcntl.flock(lock, fcntl.LOCK_EX)
    named = folder.with_name(folder.name[1:])
    folder.rename(named)  # nobody sees it unlocked
    return lock, named


def _new_log_file() -> Path:
    """$STATEHOUSE_LOG_DIR, else <tmp>/statehouse-logs-<user>; kept after the engine's end."""
    folder = Path(os.environ.get("STATEHOUSE_LOG_DIR") or _users_folder("logs"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"sglang-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{secrets.token_hex(2)}.log"


def _users_folder(what: str) -> Path:
    """Of this user: another one's could not be written to."""
    return Path(tempfile.gettempdir()) / f"statehouse-{what}-{os.getuid()}"


def _take_ports(ports: str, count: int) -> list[tuple[int, IO[str]]]:
    """`count` free ports of the range, each with a lock held open, so that two replicas starting here differ.

    Another user's replicas have other locks; a port that is bound says enough of those that have started.
    """
    folder = _users_folder("ports")
    taken: list[tuple[int, IO[str]]] = []
    no_lock: OSError | None = None
    locked = False
    for port in parse_ports(ports):
        if len(taken) == count:
            break
        try:
            folder.mkdir(exist_ok=True)
            lock: IO[str] = open(folder / f"{port}.lock", "w")  # noqa: SIM115 - held while the replica lives
        except OSError as error:
            no_lock = error
            continue
        locked = True
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with socket.socket() as probe:
                probe.bind(("", port))
            taken.append((port, lock))
        except OSError:
            lock.close()
    if len(taken) < count:
        for _, lock in taken:
            lock.close()
        if no_lock is not None and not locked:
            raise ReplicaFailed(
                f"no port can be taken: {folder} holds a lock for each, and none can be written ({no_lock.strerror}); make the "
                "folder this user's, or set TMPDIR"
            )
        raise ReplicaFailed(
            f"no free port in {ports} (the engine takes {count}); free one, or set extraction.replica.ports=32000-32999"
        )
    return taken
