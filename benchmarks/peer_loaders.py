"""The peers' own loaders on their own formats, run by a Python that has them ($STATEHOUSE_PEERS_PYTHON). No import of ours.

    $STATEHOUSE_PEERS_PYTHON benchmarks/peer_loaders.py FOLDER --peer speculators --sequences 8 --tokens 1024 --hidden 7168

Writes random states in the peer's format into FOLDER if they are not there and says `> ready`; then, for each line of
stdin, reads them all and prints `> [wall seconds, CPU seconds]` (`benchmarks.rounds`).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")


def write(folder: Path, peer: str, sequences: int, tokens: int, hidden: int) -> None:
    import torch

    generator = torch.Generator().manual_seed(0)
    folder.mkdir(parents=True)
    rows: dict[str, list[Any]] = {"input_ids": [], "loss_mask": [], "seq_len": []}
    for number in range(sequences):
        ids, mask = torch.randint(0, 1000, (tokens,), generator=generator), torch.ones(tokens, dtype=torch.long)
        states = torch.randn(tokens, 4, hidden, generator=generator).to(torch.bfloat16)
        if peer == "specforge":
            sample = {"input_ids": ids, "loss_mask": mask, "hidden_state": states[:, 3][None].contiguous()}
            torch.save(
                {**sample, "aux_hidden_state": states[:, :3].flatten(1)[None].contiguous()},
                folder / f"{number:06d}.ckpt",
            )
            continue
        from safetensors.torch import save_file

        (folder / "hidden_states").mkdir(exist_ok=True)
        save_file({"token_ids": ids, "hidden_states": states}, folder / "hidden_states" / f"hs_{number}.safetensors")
        for name, value in (("input_ids", ids.tolist()), ("loss_mask", mask.tolist()), ("seq_len", tokens)):
            rows[name].append(value)
    if peer == "speculators":
        from datasets import Dataset

        table = Dataset.from_dict(rows)
        table.set_format("torch", columns=list(rows))
        table.save_to_disk(str(folder))


def loader(folder: Path, peer: str, tokens: int, hidden: int, workers: int) -> Callable[[], Iterator[tuple[Any, Any]]]:
    """What yields a batch's states and final states, as the peer's trainer gets them."""
    if peer == "speculators":
        from speculators.models.eagle3.data import shift_batch
        from speculators.train.data import ArrowDataset
        from speculators.train.dataloader import _setup_dataloader

        dataset = ArrowDataset(max_len=tokens, datapath=str(folder), on_missing="raise")
        made = _setup_dataloader(dataset, tokens, hidden, num_workers=workers, preprocess=shift_batch)
        return lambda: ((one["hidden_states"], one["verifier_last_hidden_states"]) for one in made)
    import torch
    from specforge.data.preprocessing import build_offline_eagle3_dataset
    from specforge.data.utils import DataCollatorWithPadding

    offline = build_offline_eagle3_dataset(str(folder), max_len=tokens)
    batches = torch.utils.data.DataLoader(
        offline, batch_size=1, shuffle=True, num_workers=workers, collate_fn=DataCollatorWithPadding(),
        prefetch_factor=2 if workers else None, persistent_workers=workers > 0,
    )  # fmt: skip
    return lambda: ((one["hidden_state"], one["target"]) for one in batches)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--peer", choices=("specforge", "speculators"), required=True)
    for name, default in (("sequences", 8), ("tokens", 1024), ("hidden", 7168), ("workers", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    if not args.folder.exists():
        write(args.folder, args.peer, args.sequences, args.tokens, args.hidden)
    items = loader(args.folder, args.peer, args.tokens, args.hidden, args.workers)
    print("> ready", flush=True)
    for _ in sys.stdin:
        began, cpu, touched = time.perf_counter(), time.process_time(), 0.0
        for states, final in items():
            # Every row is looked at, so that what is only mapped is really read.
            touched += float(states[..., ::2048].float().sum() + final[..., ::2048].float().sum())
        print(f"> {json.dumps([time.perf_counter() - began, time.process_time() - cpu])}", flush=True)


if __name__ == "__main__":
    main()
