"""The engine's own process: an sglang.Engine that takes requests from a pipe.

    python statehouse_engine.py <reply fd>       started by ray_jobs/replicas/sglang.py, by nobody else

SGLang kills the process that owns an Engine when one of its schedulers dies, without an exception, and wants that
process's main thread for its signals. So the owner is this process and not the caller's: what the caller sees of a
death is the end of a pipe. One JSON object a line, both ways; stdin's end means stop.

    in:  {"engine": {arguments of sglang.Engine}}                     first line
         {"id", "rid", "input_ids", "sampling_params", "capture"}     a request
         {"abort": rid}
    out: {"ready": {...}}                                             once ("listed": lists of states that came the engine's own way)
         {"id", "output_ids", "finish_reason", "handle", "speculation"} or {"id", "error"}

It imports nothing of the project. Its standard output and error are the engine's log.
"""

import contextlib
import json
import os
import shutil
import sys
import threading


def end(leftovers: list) -> None:
    """End this process with all that it started, and remove what they leave behind."""
    import psutil

    children = psutil.Process().children(recursive=True)
    for child in children:
        with contextlib.suppress(psutil.Error):
            # multiprocessing's tracker ends by itself, after it has unlinked the semaphores of the others
            if not any("resource_tracker" in part for part in child.cmdline()):
                child.kill()
    psutil.wait_procs(children, timeout=3)
    for path in leftovers:
        with contextlib.suppress(OSError):
            os.unlink(path)
    shutil.rmtree(os.environ["STATEHOUSE_CAPTURE_DIR"], ignore_errors=True)
    os._exit(0)


def _shared_memory(port_args) -> list:
    """Files under /dev/shm that SGLang names after its sockets and never removes."""
    from sglang.srt.managers.load_snapshot import shm_path_for

    paths = [shm_path_for(value) for value in vars(port_args).values() if isinstance(value, str)]
    return [path for path in paths if os.path.exists(path)]


def _speculation(meta: dict) -> dict:
    """Verify passes and accepted drafts of one response, and the drafts that each pass accepted."""
    passes = meta.get("statehouse_passes") or []
    return {
        "verifies": meta.get("spec_verify_ct", 0),
        "accepted": meta.get("spec_num_correct_drafts", 0),
        "passes": [count for count in passes if count is not None],
    }


class Host:
    """Requests from stdin into the engine, results into the reply pipe."""

    def __init__(self, reply_fd: int) -> None:
        self.replies = os.fdopen(reply_fd, "w", buffering=1)
        os.set_inheritable(reply_fd, False)  # the pipe must end when this process does
        self.loop = None
        self.engine = None
        self.leftovers = []
        self.tasks = set()

    def reply(self, message: dict) -> None:
        self.replies.write(json.dumps(message) + "\n")

    def listen(self) -> None:
        """Thread: read stdin until it ends, which is when the caller stops us or dies."""
        for line in sys.stdin:
            self.loop.call_soon_threadsafe(self.take, json.loads(line))
        end(self.leftovers)

    def take(self, message: dict) -> None:
        if "abort" in message:
            self.engine.tokenizer_manager.abort_request(rid=message["abort"])
        else:
            task = self.loop.create_task(self.answer(message))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def answer(self, message: dict) -> None:
        try:
            result = await self.engine.async_generate(
                input_ids=message["input_ids"],
                sampling_params=message["sampling_params"],
                return_hidden_states=message["capture"],
                rid=message["rid"],
            )
            meta = result["meta_info"]
            handles = [handle for handle in meta.get("statehouse") or [] if handle]
            self.reply(
                {
                    "id": message["id"],
                    "output_ids": list(result["output_ids"]),
                    "finish_reason": meta["finish_reason"],
                    "handle": handles[0] if handles else None,
                    "speculation": _speculation(meta),
                    "listed": len(meta.get("hidden_states") or []),
                }
            )
        except Exception as error:
            self.reply({"id": message["id"], "error": f"{type(error).__name__}: {error}"})

    def run(self) -> None:
        arguments = json.loads(sys.stdin.readline())["engine"]
        threading.Thread(target=self.listen, daemon=True, name="statehouse-requests").start()
        import sglang

        if arguments["device"] == "cuda":
            import torch

            if not torch.cuda.is_available():
                raise SystemExit("the replica asks for GPUs and torch sees none")
        self.engine = sglang.Engine(**arguments)
        self.loop = self.engine.loop
        self.leftovers = _shared_memory(self.engine.port_args)
        info = self.engine._scheduler_init_result.scheduler_infos[0]
        self.reply(
            {
                "ready": {
                    "engine_version": sglang.__version__,
                    "tp_size": self.engine.server_args.tp_size,
                    "max_total_num_tokens": info["max_total_num_tokens"],
                    "max_req_input_len": info["max_req_input_len"],
                    "context_length": self.engine.tokenizer_manager.model_config.context_len,
                    "leftovers": self.leftovers,
                    "scheduler_pids": list(self.engine._scheduler_init_result.all_child_pids),
                }
            }
        )
        self.loop.run_forever()


if __name__ == "__main__":
    Host(int(sys.argv[1])).run()
