"""Runs under the Python of an environment with SpecForge and speculators: their counting and mapping of our tokens.

    PEERS_PYTHON tests/vocab/peer_vocab.py IDS.parquet VOCAB DRAFT FOLDER [specforge|speculators ...]

Writes the tokens in their own format (not timed), then calls their own functions, each in a fresh process, and prints
one `RESULT {json}` line a peer with seconds, peak memory and a hash of the ids it chose. Maps are left in FOLDER.
"""

import hashlib
import json
import os
import subprocess
import sys
import time


def convert(source: str, target: str) -> None:
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq
    from datasets import Dataset

    table = pq.read_table(source)
    ids, mask = table["token_ids"].combine_chunks(), table["loss_mask"].combine_chunks()

    def wide(column: pa.ListArray) -> pa.ListArray:
        values = column.flatten().to_numpy(zero_copy_only=False).astype(np.int64)
        return pa.ListArray.from_arrays(column.offsets, pa.array(values))

    Dataset(pa.table({"input_ids": wide(ids), "loss_mask": wide(mask)})).save_to_disk(target)


def child(peer: str, data: str, vocab: int, draft: int, folder: str) -> None:
    import torch
    from datasets import load_from_disk

    rows = load_from_disk(data)
    rows.set_format("torch", columns=["input_ids", "loss_mask"])
    if peer == "speculators":
        from speculators.train.vocab_mapping import (
            build_vocab_mappings_from_distribution,
            save_token_frequency_distribution,
        )

        path = os.path.join(folder, "token_freq.pt")
        began, cpu = time.perf_counter(), time.process_time()
        save_token_frequency_distribution(rows, path)
        d2t, t2d = build_vocab_mappings_from_distribution(torch.load(path), draft, vocab)
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    else:
        from specforge.data.preprocessing import generate_vocab_mapping_file

        began, cpu = time.perf_counter(), time.process_time()
        path = generate_vocab_mapping_file(rows, vocab, draft, cache_dir=folder, cache_key="map")
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        found = torch.load(path, weights_only=True)
        d2t, t2d = found["d2t"], found["t2d"]
    torch.save({"d2t": d2t, "t2d": t2d}, os.path.join(folder, f"map_{peer}.pt"))
    ids = t2d.nonzero().squeeze(1).to(torch.int64).numpy().astype("<i8")
    with open("/proc/self/status") as status:
        peak = int(next(line for line in status if line.startswith("VmHWM")).split()[1]) / 1024
    result = {"peer": peer, "seconds": seconds, "cpu_seconds": cpu, "peak_mb": peak}
    print("RESULT " + json.dumps(result | {"hash": hashlib.sha256(ids.tobytes()).hexdigest()}))


def main() -> None:
    source, vocab, draft, folder, *peers = sys.argv[1:]
    if source == "--child":
        peer, data = peers
        return child(peer, data, int(vocab), int(draft), folder)
    data = os.path.join(folder, "peers-dataset")
    convert(source, data)
    failed = False
    for peer in peers or ["speculators", "specforge"]:
        command = [sys.executable, __file__, "--child", vocab, draft, folder, peer, data]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        print(*(line for line in done.stdout.splitlines() if line.startswith("RESULT ")), sep="\n", flush=True)
        sys.stderr.write(done.stderr[-2000:] if done.returncode else "")
        failed = failed or done.returncode != 0
    sys.exit(failed)


if __name__ == "__main__":
    main()
