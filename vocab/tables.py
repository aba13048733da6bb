"""Trade-offs as tables in a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vocab.coverage import percent
from vocab.tradeoff import Tradeoff

if TYPE_CHECKING:
    from rich.console import Console

_BATCHES_SHOWN = (1, 4, 16, 64, 256)


def render_tradeoff(found: Tradeoff, console: Console) -> None:
    """Print weights by size, tau by size, speed by batch size, and the recommendation."""
    _weights(found, console)
    _acceptance(found, console)
    _speeds(found, console)
    _training(found, console)
    chosen = found.recommendation
    console.print(f"Recommended: [bold]{chosen.size:,}[/bold] ids: {chosen.reason}.", highlight=False, soft_wrap=True)
    if chosen.sensitivity:
        others = {what: size for what, size in chosen.sensitivity.items() if size != chosen.size}
        said = "; ".join(f"{what}: {size:,}" for what, size in others.items()) or "nothing that was varied changes it"
        console.print(f"Sensitivity ({len(chosen.sensitivity)} variants): {said}.", highlight=False, soft_wrap=True)
    console.print(f"Note: {chosen.warning}", highlight=False, soft_wrap=True)


def teacher_rows(study: dict[str, Any]) -> list[list[str]]:
    """[size, likeliest token, probability, the same two held out] of a study that holds a teacher's coverage."""
    teacher = study["teacher"]
    rows = []
    for at, size in enumerate(study["sizes"]):
        row = [f"{size:,}"]
        for part in (teacher, teacher["held_out"]):
            argmax, mass = (None, None) if part is None else (part["argmax"], part["mass"])
            row.append(percent(None if argmax is None else argmax[at]))
            ends = None if mass is None else (percent(mass["low"][at]), percent(mass["high"][at]))
            row.append("-" if ends is None else ends[0] if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}")
        rows.append(row)
    return rows


TEACHER_HEAD = ("ids", "likeliest token", "probability", "likeliest, held-out split", "probability, held-out split")


def render_teacher(study: dict[str, Any], console: Console) -> None:
    """Print how much of what the verifier would say each size covers."""
    from rich.table import Table

    table = Table(title=f"what the verifier would say at {study['teacher']['positions']:,} positions, cross-fitted")
    for heading in TEACHER_HEAD:
        table.add_column(heading, justify="right")
    for row in teacher_rows(study):
        table.add_row(*row)
    console.print(table)


def _weights(found: Tradeoff, console: Console) -> None:
    from rich.table import Table

    q = found.question
    table = Table(title=f"{q.verifier.name}: weights of a drafter over hidden size {q.drafter.hidden_size:,}")
    for heading in (
        "size",
        "lm_head",
        "bf16 bytes",
        "drafter",
        "lm_head of it",
        "a step reads",
        "lm_head of it",
        "coverage",
    ):
        table.add_column(heading, justify="right")
    for row in found.sizes:
        table.add_row(
            f"{row.size:,}",
            f"{row.lm_head_parameters:,}",
            f"{row.lm_head_bytes:,}",
            billions(row.drafter_parameters),
            percent(row.share_of_drafter, 1),
            billions(row.step_parameters),
            percent(row.share_of_step, 1),
            percent(row.coverage),
        )
    console.print(table)
    console.print("drafter: with its frozen embedding. a step reads: without it.", highlight=False)


def _acceptance(found: Tradeoff, console: Console) -> None:
    from rich.table import Table

    q = found.question
    given = ", ".join(f"tau({k}) = {tau:g}" for k, tau in q.taus.items())
    table = Table(title=f"tau by draft length; whole vocabulary {given}{' (assumed)' if q.assumed_tau else ''}")
    shown = [k for k in (1, 3, 5, 7) if k in q.draft_lengths] or list(q.draft_lengths)[:4]
    for heading in ("size", *(f"k = {k}" for k in shown), f"loss at k = {shown[min(1, len(shown) - 1)]}"):
        table.add_column(heading, justify="right")
    for row in found.sizes:
        if row.tau is None:
            continue
        cells = [_pair(row.tau[k].average, row.tau[k].none, "{:.2f}") if k in row.tau else "-" for k in shown]
        at = row.tau.get(shown[min(1, len(shown) - 1)])
        whole = found.sizes[-1].tau
        loss = "-"
        if at is not None and whole is not None:
            best = whole[shown[min(1, len(shown) - 1)]].none
            loss = _pair(max(0.0, 1 - at.none / best), max(0.0, 1 - at.average / best), "{:.1%}")
        table.add_row(f"{row.size:,}", *cells, loss)
    if table.row_count > 1:
        console.print(table)


def _speeds(found: Tradeoff, console: Console) -> None:
    from rich.table import Table

    q = found.question
    known = [row.size for row in found.sizes if row.tau is not None]
    shown = [batch for batch in _BATCHES_SHOWN if batch in q.batches] or list(q.batches)[:5]
    where = f"{q.machine.tensor_parallel} x {q.machine.gpu.name}, {q.machine.server}"
    table = Table(title=f"tokens/s at the best draft length, and over the whole vocabulary ({where})")
    for heading in ("size", *(f"batch {batch}" for batch in shown)):
        table.add_column(heading, justify="right")
    for size in known:
        cells = []
        for batch in shown:
            row = found.best(size, batch)
            ratio = _pair((row.vs_full_low or 1) - 1, (row.vs_full_high or 1) - 1, "{:+.1%}")
            speedup = _pair(row.speedup_low or 0, row.speedup_high or 0, "{:.2f}")
            whole = size == q.drafter.vocab_size
            cells.append(f"{row.low:,.0f} (k={row.k})\n{speedup}x{'' if whole else f', {ratio}'}")
        table.add_row(f"{size:,}", *cells)
    console.print(table)
    console.print(
        "x: over no speculation; %: over the whole vocabulary at the same draft length; low to high end.",
        highlight=False,
    )
    table = Table(title="break-even coverage against the whole vocabulary, draft length 3 or the nearest asked for")
    for heading in ("size", *(f"batch {batch}" for batch in shown)):
        table.add_column(heading, justify="right")
    k = min(q.draft_lengths, key=lambda length: abs(length - 3))
    for row_of_size in found.sizes[:-1]:
        rows = [found.speed(row_of_size.size, batch, k) for batch in shown]
        table.add_row(
            f"{row_of_size.size:,}", *(percent(row.break_even) if row.break_even else "never" for row in rows)
        )
    if table.row_count:
        console.print(table)
    if not all(found.speed(q.sizes[-1], batch, q.draft_lengths[0]).fits for batch in shown):
        console.print(
            f"Note: weights and KV cache do not fit into {q.machine.tensor_parallel} x {q.machine.gpu.memory_gb:g} GB at "
            "every batch size shown; raise --tensor-parallel.", highlight=False, soft_wrap=True,
        )  # fmt: skip


def _training(found: Tradeoff, console: Console) -> None:
    from rich.table import Table

    q = found.question
    table = Table(title=f"training, {q.ttt_steps} TTT steps, {q.training_workers} workers, lm_head trained")
    for heading in ("size", "trained", "GFLOP a token", "weights + Adam", "gradients sent a step"):
        table.add_column(heading, justify="right")
    for row in found.sizes:
        cost = row.training
        table.add_row(
            f"{row.size:,}",
            billions(cost.trained_parameters),
            f"{cost.flops_per_token / 1e9:.1f}",
            f"{cost.state_bytes / 1e9:.1f} GB",
            f"{cost.gradient_bytes / 1e9:.1f} GB",
        )
    console.print(table)


def billions(count: int) -> str:
    """Parameters with three digits: 2.59 B, 229 M."""
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.4g} M"


def _pair(low: float, high: float, form: str) -> str:
    one, other = form.format(low), form.format(high)
    return one if one == other else f"{one}..{other}"
