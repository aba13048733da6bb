"""What does a step of drafter training cost, in time and memory, against the peers and against what it must cost?

    python -m benchmarks.drafter [--quick] [--json out.json] [--folder DIR] [--only growth,vocabulary,packing,peers]

Steps of our trainer beside SpecForge's (trained lm_head) and speculators' (frozen), in one thread, in turn, in CPU
seconds, on the same ids, masks, states and draft vocabulary (peers: when $STATEHOUSE_PEERS_PYTHON is a Python that has
them; their GPU-only losses are replaced by their own references). Then how cost grows with tokens and steps, beside the
floor (benchmarks/drafter_floor.py); memory over the whole vocabulary of Kimi-K2.5; packing against padding. The
verifier's likeliest tokens are known after the first step (a run keeps them), the peers work them out each time. On a CPU
that multiplies bf16 slower than fp32 (one without AVX512 or AMX: 50 times), bf16 is left out, and its limits are said to be
not measured.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.drafter_floor import floor, rate
from benchmarks.drafter_sides import PEERS, Shape, Side, Times, interleaved, measure
from benchmarks.report import Report, arguments

SHAPES = (
    Shape(576, 8_192, 49_152, (512,), 7),
    Shape(576, 8_192, 49_152, (1024,), 7),
    Shape(256, 2_048, 4_096, (512,), 7),
    Shape(576, 32_000, 49_152, (512,), 3),
)
# Tokens of a batch.
GROWTH = (512, 1024, 2048, 4096, 8192)
# Ours with the lm_head that the peer trains with.
MODES = {"specforge": "trained", "speculators": "frozen"}
LIMITS = {("bfloat16", 0.6): 0.55, ("float32", 0.6): 0.7, ("bfloat16", 1.0): 0.7, ("float32", 1.0): 0.9}
SHORT = {"bfloat16": "bf16", "float32": "fp32"}
SLOW = "this CPU multiplies bf16 slower than fp32"


def dtypes(report: Report) -> list[str]:
    """The dtypes worth training in on this CPU, by the rate of their products."""
    found = {}
    for dtype, size in ((torch.float32, 1536), (torch.bfloat16, 512)):
        found[dtype] = rate(dtype, size)
        if dtype == torch.bfloat16 and found[dtype] > found[torch.float32]:
            found[dtype] = rate(dtype, 1536)
        report.row(f"matrix product, {str(dtype)[6:]}, 1 thread", "GFLOP/s", [found[dtype]])
    return [str(dtype)[6:] for dtype in found if found[dtype] >= found[torch.float32]]


def against_peers(report: Report, folder: Path, quick: bool, usable: list[str]) -> None:
    """Each shape, dtype and share of loss; all sides of one cell are alive at the same time and take steps in turn."""
    peers = [peer for peer in PEERS if os.environ.get("STATEHOUSE_PEERS_PYTHON")]
    # First the one whose memory counts, while all processes are fresh.
    cells = [(SHAPES[3], usable[-1], 0.6)]
    cells += [(shape, *cell) for shape in (SHAPES[2:] if quick else SHAPES) for cell in LIMITS if cell[0] in usable]
    cells = list(dict.fromkeys(cells))
    worst: dict[str, float] = {}
    sides = {mode: Side("statehouse", folder) for mode in MODES.values()} | {peer: Side(peer, folder) for peer in peers}
    try:
        for at, (base, dtype, share) in enumerate(cells):
            found = cell(report, sides, replace(base, loss_share=share), dtype, 1 if quick else 5)
            for peer in peers:
                name = f"{SHORT[dtype]}_{100 * share:.0f}_over_{peer}"
                worst[name] = max(worst.get(name, 0.0), found[MODES[peer]].median / found[peer].median)
            if at == 0:
                memory(report, found)
    except RuntimeError as error:
        report.absent("a side", f"failed: {error}")
    finally:
        for side in sides.values():
            side.close()
    for peer in PEERS:
        for (dtype, share), limit in LIMITS.items():
            name = f"{SHORT[dtype]}_{100 * share:.0f}_over_{peer}"
            if name in worst:
                what = f"our step over {peer}'s, lm_head {MODES[peer]}, the worst shape"
                report.bar(name, worst[name], limit, "lower", what)
            else:
                why = f"{peer} is not installed, or failed" if dtype in usable else SLOW
                report.absent(f"bar {name}", f"not measured: {why}")


def cell(report: Report, sides: dict[str, Side], shape: Shape, dtype: str, repeats: int) -> dict[str, Times]:
    for name, side in sides.items():
        side.build(shape, dtype, "trained" if name in PEERS else name)
    found = interleaved(sides, repeats)
    for name, times in found.items():
        who = name if name in PEERS else f"statehouse, lm_head {name}"
        what = f"{shape.name}, {SHORT[dtype]}: {who}"
        report.row(what, "CPU s a step", times.seconds, note=f"peak {times.peak_mb:.0f} MB")
    return found


def memory(report: Report, found: dict[str, Times]) -> None:
    """Peaks above the bare process at 32,000 draft ids, over that of the leaner peer."""
    peers = {peer: found[peer].peak_mb for peer in PEERS if peer in found}
    if not peers:
        report.absent("bar memory_over_leaner_peer", "not measured: no peer is installed")
        return
    leaner = min(peers, key=lambda peer: peers[peer])
    what = (
        f"peak memory of a step at 32,000 draft ids over {leaner}'s, the leaner peer; lm_head {MODES[leaner]} as there"
    )
    report.bar("memory_over_leaner_peer", found[MODES[leaner]].peak_mb / peers[leaner], 0.5, "lower", what)
    for mode in MODES.values():
        share = found[mode].peak_mb / peers[leaner]
        report.row(f"peak memory at 32,000 over {leaner}'s, our lm_head {mode}", "share", [share])


def growth(report: Report, folder: Path, quick: bool, usable: list[str]) -> None:
    """Cost as tokens and steps grow, and the share of the floor in it."""
    base = SHAPES[0]
    shapes = [replace(base, lengths=(count,), steps=3 if quick else 7) for count in (GROWTH[::4] if quick else GROWTH)]
    shapes += [replace(base, lengths=(1024,), steps=count) for count in ((1, 8) if quick else (1, 2, 4, 8))]
    for dtype in SHORT:
        name = f"floor_share_{SHORT[dtype]}"
        if dtype not in usable:
            report.absent(f"bar {name}", f"not measured: {SLOW}")
            continue
        shares = []
        for shape in shapes:
            times = measure(shape, folder, dtype, "trained", 1 if quick else 5)
            parts = floor(shape, getattr(torch, dtype))
            least = sum(parts.values())
            median = times.median
            said = ", ".join(f"{name} {value:.3f}" for name, value in parts.items())
            what = f"{shape.name}, {SHORT[dtype]}: our step"
            note = f"floor {least:.3f} s ({said}): {100 * least / median:.0f} %; {1e6 * median / shape.tokens:.0f} us a token"
            report.row(what, "CPU s a step", times.seconds, note=note)
            if shape.tokens >= 1024:
                shares.append(least / median)
        what = f"least share of the floor in a step at T >= 1,024, {SHORT[dtype]}"
        report.bar(name, min(shares), 0.7, "higher", what)


def whole_vocabulary(report: Report, folder: Path, quick: bool, dtype: str) -> None:
    """Peak memory with 163,840 draft ids of 163,840, at T 1,024 and 2,048."""
    peaks = {}
    for tokens in (1024, 2048):
        shape = Shape(256, 163_840, 163_840, (tokens,), 2 if quick else 3)
        times = measure(shape, folder, dtype, "frozen", 1)
        peaks[tokens] = times.peak_mb
        what = f"{shape.name}, {SHORT[dtype]}, lm_head frozen: our step"
        report.row(what, "CPU s a step", times.seconds, note=f"peak {times.peak_mb:.0f} MB")
    each = (peaks[2048] - peaks[1024]) * 2**20 / 1024
    what = f"bytes by which a token more raises the peak, over those of one row of {SHORT[dtype]} logits of 163,840"
    row = 163_840 * getattr(torch, dtype).itemsize
    report.bar("whole_vocabulary_memory_growth", each / row, 0.5, "lower", what)


def packing(report: Report, folder: Path, quick: bool) -> None:
    """Tokens trained a second: eight sequences of a realistic mix side by side, and padded to the longest of them.

    Padded means a [8, longest] batch all of whose rows are computed. Ours, given padding without loss, skips most of it:
    that is a row without a bar.
    """
    random = np.random.default_rng(3)
    longest = 512 if quick else 2048
    lengths = np.clip(random.lognormal(5.6, 0.8, 8) * longest / 2048, 40 * longest / 2048, longest).astype(int).tolist()
    base = replace(SHAPES[2] if quick else SHAPES[0], loss_share=1.0)
    padding = tuple(max(lengths) - length for length in lengths)
    whole = (max(lengths),) * len(lengths)
    shapes = {
        "packed": replace(base, lengths=tuple(lengths)),
        "padded": replace(base, lengths=whole),
        "padded, padding without loss": replace(base, lengths=whole, padding=padding),
    }
    # Their ratio is far from the noise, so they need not take turns.
    speeds = {}
    for name, shape in shapes.items():
        times = measure(shape, folder, "float32", "trained", 1 if quick else 5)
        speeds[name] = sum(lengths) / times.median
        note = f"{sum(lengths)} tokens in 8 sequences, {speeds[name]:.0f} tokens/s"
        what = f"H {base.hidden}, fp32, eight sequences {name}"
        report.row(what, "CPU s a step", times.seconds, note=note)
    what = f"tokens a second of sequences of {min(lengths)} to {max(lengths)} tokens packed, over those padded to the longest"
    report.bar("packed_over_padded", speeds["packed"] / speeds["padded"], 1.5, "higher", what)


def main() -> None:
    args = arguments("drafter", __doc__, ("growth", "vocabulary", "packing", "peers"), folder=True)
    torch.set_num_threads(1)
    report = Report("drafter", args.quick)
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        usable = dtypes(report)
        if "growth" in args.only:
            growth(report, folder, args.quick, usable)
        if "vocabulary" in args.only:
            whole_vocabulary(report, folder, args.quick, usable[-1])
        if "packing" in args.only:
            packing(report, folder, args.quick)
        if "peers" in args.only:
            against_peers(report, folder, args.quick, usable)
    report.show(args.json)


if __name__ == "__main__":
    main()
