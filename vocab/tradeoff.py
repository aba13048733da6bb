"""What each draft-vocabulary size costs and brings: weights, time, acceptance, tokens per second, a recommendation.

    python -m vocab tradeoff --verifier kimi-k2.5 --gpu rtx-pro-6000 --coverage 32000=0.983

Speeds of a size whose coverage is known are a pair: `low` takes tokens outside the vocabulary to have been kept as often
as any other, `high` takes them never to have been kept (see `vocab.acceptance_model`). With a fit the two are one. The
whole vocabulary loses nothing, so its pair is one number. Where no coverage is known there is the break-even: the
coverage at which `low` equals the whole vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from vocab.acceptance_model import Bracket, bracket, chain_from_tau, tau_of
from vocab.coverage import check_size, default_sizes
from vocab.errors import VocabError
from vocab.hardware import GPUS
from vocab.roofline import Machine, TrainingCost, draft_step, fits, round_seconds, training_cost, verifier_step
from vocab.shapes import Drafter, Verifier

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
DRAFT_LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8)
# Two sizes within this share of each other are the same speed for a recommendation: no roofline is better than that.
_TIE = 0.005

REJECTION_WARNING = (
    "SGLang's rejection sampling (speculative_use_rejection_sampling, off by default; what it gains shows at "
    "temperature > 0) refuses a draft vocabulary that is not the verifier's: if you serve with it, train the whole one."
)


@dataclass(frozen=True)
class Question:
    """All that the trade-off depends on.

    taus: {draft length: tau} of the drafter with the whole vocabulary, measured or assumed (`assumed_tau` says which).
    coverage: {size: share of the verifier's tokens covered}, held out where possible.
    fitted: {size: {draft length: tau}} where an AcceptanceModel gave them; replaces the bracket there.
    """

    verifier: Verifier
    drafter: Drafter
    machine: Machine
    sizes: tuple[int, ...]
    coverage: Mapping[int, float] = field(default_factory=dict)
    taus: Mapping[int, float] = field(default_factory=lambda: {3: 2.0})
    assumed_tau: bool = True
    fitted: Mapping[int, Mapping[int, float]] = field(default_factory=dict)
    batches: tuple[int, ...] = BATCHES
    draft_lengths: tuple[int, ...] = DRAFT_LENGTHS
    ttt_steps: int = 7
    training_workers: int = 8

    def __post_init__(self) -> None:
        vocab_size = self.drafter.vocab_size
        if vocab_size != self.verifier.vocab_size or self.drafter.hidden_size != self.verifier.hidden_size:
            raise VocabError(
                f"drafter: expected vocabulary {self.verifier.vocab_size:,} and hidden size "
                f"{self.verifier.hidden_size:,}, as the verifier, found {vocab_size:,} and {self.drafter.hidden_size:,}"
            )
        given = self.sizes or tuple(default_sizes(vocab_size))
        sizes = sorted({*(check_size(size, vocab_size) for size in given), vocab_size})
        object.__setattr__(self, "sizes", tuple(sizes))
        for size, share in self.coverage.items():
            check_size(size, vocab_size)
            if not 0 < share <= 1:
                raise VocabError(f"coverage of {size:,} ids: expected a share above 0, at most 1, found {share}")
        for name in ("batches", "draft_lengths"):
            values = getattr(self, name)
            if not values or min(values) < 1:
                raise VocabError(f"{name}: expected whole numbers above zero, found {list(values)}")
        chain_from_tau(self.taus, max(self.draft_lengths))  # raises for a tau that cannot be


@dataclass(frozen=True)
class SizeRow:
    """One size. Shares in [0, 1]; bytes are bf16. share_of_drafter counts the frozen embedding, share_of_step does not.

    tau: {draft length: bracket}; None where the coverage is not known.
    """

    size: int
    lm_head_parameters: int
    lm_head_bytes: int
    drafter_parameters: int
    share_of_drafter: float
    step_parameters: int
    share_of_step: float
    coverage: float | None
    tau: dict[int, Bracket] | None
    training: TrainingCost


@dataclass(frozen=True)
class SpeedRow:
    """One size at one batch size and draft length. Tokens per second of the whole batch; ratios are dimensionless.

    low, high: see the module. Both None where the coverage is not known. break_even: coverage at which low equals the
    whole vocabulary, None where not even full coverage does.
    """

    size: int
    batch: int
    k: int
    draft_step_s: float
    verify_s: float
    low: float | None
    high: float | None
    speedup_low: float | None
    speedup_high: float | None
    vs_full_low: float | None
    vs_full_high: float | None
    break_even: float | None
    fits: bool


@dataclass(frozen=True)
class Recommendation:
    """The size to train, why, and what would change the answer: {what was varied: the size then}."""

    size: int
    reason: str
    sensitivity: dict[str, int]
    warning: str


@dataclass(frozen=True)
class Tradeoff:
    """Everything that was worked out for a Question."""

    question: Question
    sizes: tuple[SizeRow, ...]
    speeds: tuple[SpeedRow, ...]
    recommendation: Recommendation

    def speed(self, size: int, batch: int, k: int) -> SpeedRow:
        """The row of this size, batch size and draft length. Raises VocabError when it was not asked for."""
        for row in self.speeds:
            if (row.size, row.batch, row.k) == (size, batch, k):
                return row
        raise VocabError(f"trade-off: no row of size {size}, batch {batch}, draft length {k}")

    def best(self, size: int, batch: int) -> SpeedRow:
        """The draft length that is fastest for this size and batch at the low end (break-even rows: at any)."""
        rows = [row for row in self.speeds if (row.size, row.batch) == (size, batch)]
        return max(rows, key=lambda row: row.low or 0.0)

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts and lists for JSON; keys of dicts are text."""
        q = self.question
        return {
            "verifier": asdict(q.verifier) | {"weight_bytes": q.verifier.weight_bytes},
            "drafter": asdict(q.drafter),
            "gpu": asdict(q.machine.gpu),
            "tensor_parallel": q.machine.tensor_parallel,
            "server": q.machine.server,
            "assumptions": asdict(q.machine.assumptions),
            "step_times": "measured where given, else roofline" if q.machine.measured_step_s else "roofline",
            "taus_full": {str(k): tau for k, tau in q.taus.items()},
            "taus_assumed": q.assumed_tau,
            "fitted": sorted(q.fitted),
            "sizes": [_texts(asdict(row)) for row in self.sizes],
            "speeds": [asdict(row) for row in self.speeds],
            "recommendation": asdict(self.recommendation),
        }


def answer(question: Question, *, sensitivity: bool = True) -> Tradeoff:
    """Work the question out. Without `sensitivity` the recommendation does not say what would change it."""
    chain = chain_from_tau(question.taus, max(question.draft_lengths))
    break_even = sensitivity  # forty rates each: not where only the ranking of sizes is asked for
    sizes = tuple(_size_row(question, size, chain) for size in question.sizes)
    speeds = tuple(
        _speed_row(question, row, batch, k, chain, break_even)
        for row in sizes
        for batch in question.batches
        for k in question.draft_lengths
    )
    found = Tradeoff(question, sizes, speeds, Recommendation(question.sizes[-1], "", {}, ""))
    return replace(found, recommendation=_recommend(found, sensitivity))


def _size_row(q: Question, size: int, chain: np.ndarray) -> SizeRow:
    drafter, head = q.drafter, q.drafter.lm_head(size)
    full = size == drafter.vocab_size
    coverage = 1.0 if full else q.coverage.get(size)
    tau = None
    if size in q.fitted and not full:
        tau = {k: Bracket(value, value, value) for k, value in q.fitted[size].items() if k in q.draft_lengths}
    elif coverage is not None:
        tau = {k: bracket(chain, coverage, k) for k in q.draft_lengths}
    return SizeRow(
        size=size,
        lm_head_parameters=head,
        lm_head_bytes=2 * head,
        drafter_parameters=drafter.total(size),
        share_of_drafter=head / drafter.total(size),
        step_parameters=drafter.step(size),
        share_of_step=head / drafter.step(size),
        coverage=coverage,
        tau=tau,
        training=training_cost(drafter, size, ttt_steps=q.ttt_steps, workers=q.training_workers),
    )


def _rate(q: Question, size: int, batch: int, k: int, tau: float) -> float:
    """Tokens per second of the batch."""
    return batch * tau / round_seconds(q.machine, q.verifier, q.drafter, size, batch, k, tau)


def _speed_row(q: Question, row: SizeRow, batch: int, k: int, chain: np.ndarray, break_even: bool) -> SpeedRow:
    size, machine = row.size, q.machine
    plain = batch / verifier_step(machine, q.verifier, batch, 1)
    full = _rate(q, q.drafter.vocab_size, batch, k, tau_of(chain, k))
    low = high = None
    if row.tau is not None and k in row.tau:
        low = _rate(q, size, batch, k, row.tau[k].average)
        high = _rate(q, size, batch, k, row.tau[k].none)
    even: float | None = 1.0
    if size < q.drafter.vocab_size and break_even:
        even = _break_even(q, size, batch, k, chain, full)
    return SpeedRow(
        size=size,
        batch=batch,
        k=k,
        draft_step_s=draft_step(machine, q.drafter, size, batch),
        verify_s=verifier_step(machine, q.verifier, batch, k + 1),
        low=low,
        high=high,
        speedup_low=None if low is None else low / plain,
        speedup_high=None if high is None else high / plain,
        vs_full_low=None if low is None else low / full,
        vs_full_high=None if high is None else high / full,
        break_even=even,
        fits=fits(machine, q.verifier, q.drafter, size, batch),
    )


def _break_even(q: Question, size: int, batch: int, k: int, chain: np.ndarray, full: float) -> float | None:
    """The coverage at which this size is as fast as the whole vocabulary, by bisection; None if none is enough."""

    def rate(coverage: float) -> float:
        return _rate(q, size, batch, k, bracket(chain, coverage, k).average)

    if rate(1.0) < full:
        return None
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if rate(middle) < full else (low, middle)
    return high


def _scores(found: Tradeoff, side: str) -> dict[int, float]:
    """Geometric mean over the batch sizes of a size's speed over the whole vocabulary's, each at its own best k."""
    q = found.question
    whole = q.drafter.vocab_size
    best: dict[tuple[int, int], float] = {}
    for row in found.speeds:
        rate = row.low if side == "low" else row.high
        if rate is not None:
            best[row.size, row.batch] = max(best.get((row.size, row.batch), 0.0), rate)
    return {
        size: math.exp(float(np.mean([math.log(best[size, b] / best[whole, b]) for b in q.batches])))
        for size in q.sizes
        if (size, q.batches[0]) in best
    }


def _choice(scores: Mapping[int, float]) -> int:
    """The largest size that is within a tie of the fastest: coverage on other text is worth more than half a percent."""
    best = max(scores.values())
    return max(size for size, score in scores.items() if score >= best * (1 - _TIE))


def _recommend(found: Tradeoff, sensitivity: bool) -> Recommendation:
    q = found.question
    low, high = _scores(found, "low"), _scores(found, "high")
    size = _choice(low)
    whole = q.drafter.vocab_size
    span = f"batch sizes {q.batches[0]} to {q.batches[-1]}" if len(q.batches) > 1 else f"batch size {q.batches[0]}"
    if len(low) == 1:
        rows = [row for row in found.speeds if row.size != whole and row.break_even is not None]
        worst = max((row.break_even or 1.0 for row in rows), default=1.0)
        reason = (
            f"no coverage is known, so only the whole vocabulary is certain; a smaller one pays where it covers more than "
            f"its break-even (at most {worst:.2%} of tokens here): count tokens with `python -m vocab coverage`"
        )
    elif size == whole:
        other = max((s for s in low if s != whole), key=low.__getitem__)
        reason = (
            f"no smaller size is surely faster: the best, {other:,} ids, gives {low[other] - 1:+.1%} to "
            f"{high[other] - 1:+.1%} tokens per second over {span}"
        )
    else:
        row = next(r for r in found.sizes if r.size == size)
        known = "as fitted" if size in q.fitted else f"at {row.coverage:.2%} coverage"
        ends = (f"{low[size] - 1:+.1%}", f"{high[size] - 1:+.1%}")
        gain = ends[0] if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"
        fastest = max(low, key=low.__getitem__)
        tie = "" if fastest == size else f"; the largest size within {_TIE:.1%} of the fastest, {fastest:,} ids"
        reason = (
            f"{gain} tokens per second over the whole vocabulary {known}, mean over "
            f"{span}, each at its own best draft length{tie}; its lm_head is {row.share_of_step:.0%} of what a step reads, "
            f"not {found.sizes[-1].share_of_step:.0%}, and training costs "
            f"{row.training.flops_per_token / found.sizes[-1].training.flops_per_token:.0%} of the FLOPs"
        )
    varied = _sensitivity(q) if sensitivity else {}
    return Recommendation(size, reason, varied, REJECTION_WARNING)


def _sensitivity(q: Question) -> dict[str, int]:
    """The recommended size when one thing at a time is another."""
    m, assumed = q.machine, q.machine.assumptions
    top = max(q.taus)
    variants: dict[str, Question] = {}
    for tau in (1.5, 2.0, 2.7, 3.3):
        if tau <= top + 1:
            variants[f"tau({top}) = {tau}"] = replace(q, taus={top: tau}, fitted=_refitted(q, {top: tau}, 1.0))
    for factor in (0.5, 2.0):
        changed = replace(assumed, draft_overhead_us=assumed.draft_overhead_us * factor)
        variants[f"overhead of a draft step x {factor:g}"] = replace(q, machine=replace(m, assumptions=changed))
    for parallel in (1, 8):
        if parallel != m.tensor_parallel:
            variants[f"tensor parallel {parallel}"] = replace(q, machine=replace(m, tensor_parallel=parallel))
    for name, other in GPUS.items():
        if other != m.gpu:
            variants[f"gpu {name}"] = replace(
                q, machine=replace(m, gpu=other, measured_step_s={}, measured_verify_s={})
            )
    for part in ((1, 2, 4), (64, 128, 256)):
        inside = tuple(batch for batch in q.batches if batch in part)
        if inside and inside != q.batches:
            variants[f"batch sizes {inside[0]} to {inside[-1]} only"] = replace(q, batches=inside)
    if q.coverage:
        doubled = {size: max(1e-9, 1 - 2 * (1 - share)) for size, share in q.coverage.items()}
        variants["twice the tokens outside"] = replace(q, coverage=doubled, fitted=_refitted(q, q.taus, 2.0))
    return {name: _choice(_scores(answer(variant, sensitivity=False), "low")) for name, variant in variants.items()}


def _refitted(q: Question, taus: Mapping[int, float], outside: float) -> dict[int, dict[int, float]]:
    """The fit for another whole tau, and for `outside` times the loss: each size keeps its share of the gain."""
    longest = max(q.draft_lengths)
    before, after = chain_from_tau(q.taus, longest), chain_from_tau(taus, longest)

    def kept(tau: float, k: int) -> float:
        share = (tau - 1) / max(tau_of(before, k) - 1, 1e-12)
        return max(0.0, 1 - outside * (1 - share))

    return {
        size: {k: 1 + (tau_of(after, k) - 1) * kept(tau, k) for k, tau in row.items() if k <= longest}
        for size, row in q.fitted.items()
    }


def parse_pairs(texts: Sequence[str], what: str = "coverage", example: str = "32000=0.983") -> dict[int, float]:
    """{whole number: value} of texts such as `32000=0.983` or `32000=98.3%,16000=0.96`. Raises VocabError for others."""
    found: dict[int, float] = {}
    for text in texts:
        for part in filter(None, (piece.strip() for piece in text.split(","))):
            size, _, share = part.partition("=")
            try:
                value = float(share.rstrip("% ")) / (100 if share.rstrip().endswith("%") else 1)
                found[int(size.replace("_", ""))] = value
            except ValueError as error:
                raise VocabError(f"{what}: expected NUMBER=VALUE as in {example}, found {part!r}") from error
    return found


def _texts(row: dict[str, Any]) -> dict[str, Any]:
    tau = row["tau"]
    return row | {"tau": None if tau is None else {str(k): value for k, value in tau.items()}}
