"""SGLang plugin: hand the captured hidden states over through shared memory.

SGLang finds it by the entry point beside it and loads it into each of its processes; it acts in the schedulers, on
attention-TP rank 0. It takes the packed aux states and the post-norm final states of every prefill chunk off the
logits output (so that SGLang neither turns them into lists nor drops all chunks but the last), lets SGLang copy them
to the host on its own stream, and writes them into one file a request:

    $STATEHOUSE_CAPTURE_DIR/<rid>.states = HEADER | token ids int32 [T] | zeros to a multiple of 64 | states [T, L, H]
                                           | zeros to a multiple of 64 | teacher summary float32 [T, 1 + 2k]

The last part is there when $STATEHOUSE_TEACHER_TOPK (k) is above 0 (statehouse_teacher.py). The response carries
`meta_info["statehouse"] = [{"path", "tokens", "chunks", "layer_errors", "teacher_errors"}]`, or `{"error"}`.
In an engine that serves with a drafter it captures nothing, and notes what each verify pass accepted.
The module imports nothing of the project: it must load where only this folder is on the path.

Works on internals of SGLang 0.5.23; ray_jobs/replicas/sglang.py proves at each start that it still does.
"""

import logging
import os
import struct
from dataclasses import dataclass, replace
from pathlib import Path

import statehouse_sampling as sampling
import statehouse_teacher
import torch
from statehouse_probe import LayerProbe

log = logging.getLogger(__name__)

HEADER = struct.Struct("<8sIIIII")  # magic, dtype, tokens, slots, hidden size, k of the teacher summary
MAGIC = b"SHSTATE2"
DTYPES = {torch.float32: 0, torch.bfloat16: 1}
ALIGNMENT = 64


def data_offset(tokens: int) -> int:
    """Where the states of a file begin."""
    return _aligned(HEADER.size + 4 * tokens)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def register() -> None:
    """Entry point. Does nothing unless a Statehouse replica started this engine."""
    if not os.environ.get("STATEHOUSE_CAPTURE_DIR"):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        sampling.let_deepseek_run_on_torch_native()
        if torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2"):
            sampling.multiply_bf16_in_fp32(HookRegistry, HookType)
    if not os.environ.get("STATEHOUSE_CAPTURE_LAYERS"):  # an engine that serves: nothing is captured
        HookRegistry.register(
            "sglang.srt.managers.schedule_batch.Req.update_spec_correct_drafts_histogram", _note_pass, HookType.AFTER
        )
        return
    HookRegistry.register(
        "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation", _forward, HookType.AROUND
    )
    HookRegistry.register(
        "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch",
        sampling.seed_each_row,
        HookType.AFTER,
    )
    HookRegistry.register("sglang.srt.layers.sampler.Sampler._sample_from_probs", sampling.sample, HookType.AROUND)


# ---- capture -------------------------------------------------------------------------------------------------------


def _forward(original, worker, batch, *args, **kwargs):
    probe = LayerProbe.of(worker, batch)
    try:
        result = original(worker, batch, *args, **kwargs)
    finally:
        if probe is not None:
            probe.remove()
    out = getattr(result, "logits_output", None)
    if out is None or batch is None or not batch.forward_mode.is_extend():
        return result
    aux_TKH, final_TH = out.hidden_states, out.last_hidden_states
    if final_TH is None:  # no request of this batch asked for states
        return result
    out.hidden_states = out.last_hidden_states = None  # nobody else turns them into lists
    from sglang.srt.managers.auxiliary_output import append_auxiliary_output
    from sglang.srt.runtime_context import get_parallel

    wanted = _Wanted.of(batch, final_TH)
    teacher = _Teacher.of(worker, batch, wanted.rows_of(final_TH), out.next_token_logits if probe is not None else None)
    if get_parallel().attn_tp_rank == 0:
        out.auxiliary_device_output = append_auxiliary_output(
            out.auxiliary_device_output, _OnDevice.of(wanted, aux_TKH, final_TH, probe, teacher)
        )
    return result


@dataclass(frozen=True)
class _Rows:
    """Rows [start, start + count) of a request's states."""

    req: object
    start: int
    count: int


@dataclass(frozen=True)
class _Wanted:
    """The rows of a batch whose requests asked for states: which request they belong to, and a mask where not all did."""

    rows: tuple
    mask: torch.Tensor | None

    @classmethod
    def of(cls, batch, final_TH):
        lengths = [int(n) for n in batch.extend_lens]
        if sum(lengths) != final_TH.shape[0]:
            raise RuntimeError(f"capture: {final_TH.shape[0]} rows for chunks of {lengths}")
        rows, wanted = [], []
        for req, start, count in zip(batch.reqs, batch.prefix_lens, lengths, strict=True):
            wanted += [bool(req.return_hidden_states)] * count
            if req.return_hidden_states:
                rows.append(_Rows(req, int(start), count))
        return cls(tuple(rows), None if all(wanted) else torch.tensor(wanted, device=final_TH.device))

    def rows_of(self, tensor):
        return tensor if self.mask is None else tensor[self.mask]


@dataclass(frozen=True)
class _Teacher:
    """The summary of a batch's wanted rows. error: why there is none. errors: at a canary, how far it is from SGLang's own
    logits of the last rows, relative to the largest: of the log-sum-exp, and of the likeliest id's logit."""

    packed: torch.Tensor | None = None  # [rows, 1 + 2k]
    k: int = 0
    error: str | None = None
    errors: tuple | None = None

    @classmethod
    def of(cls, worker, batch, final_TH, logits_BV):
        """On every tensor-parallel rank alike: each holds a part of the lm_head."""
        k = int(os.environ.get("STATEHOUSE_TEACHER_TOPK") or 0)
        if not k:
            return cls()
        model = worker.model_runner.model
        try:
            if getattr(model, "_statehouse_head", None) is None:
                object.__setattr__(model, "_statehouse_head", statehouse_teacher.Head.of(model))
        except RuntimeError as error:
            return cls(error=str(error))
        packed = model._statehouse_head.summarise(final_TH, k)
        errors = None
        if logits_BV is not None and all(req.return_hidden_states for req in batch.reqs):
            last = torch.tensor([int(n) for n in batch.extend_lens], device=packed.device).cumsum(0) - 1
            errors = _far_from(packed[last], logits_BV[: len(last)].float(), k)
        return cls(packed, k, None, errors)


def _far_from(packed_BC, logits_BV, k):
    scale_B = logits_BV.abs().amax(-1)
    norm_B = (packed_BC[:, 0] - logits_BV.logsumexp(-1)).abs()
    gap_B = logits_BV.amax(-1) - logits_BV.gather(1, packed_BC[:, 1 + k : 2 + k].long()).squeeze(1)
    return tuple(float((x_B / scale_B).max()) for x_B in (norm_B, gap_B))


@dataclass(frozen=True)
class _OnDevice:
    """A batch's states before SGLang copies them to the host (its DeviceAuxiliaryOutput)."""

    states: torch.Tensor  # [rows, L * H], the rows of the wanted requests only
    hidden: int
    rows: tuple
    layer_errors: tuple | None
    teacher: _Teacher

    @classmethod
    def of(cls, wanted, aux_TKH, final_TH, probe, teacher):
        states = torch.cat((aux_TKH, final_TH.to(aux_TKH.dtype)), dim=1)  # new memory: graphs may reuse the old
        errors = probe.errors(states, final_TH.shape[1]) if probe is not None else None
        return cls(wanted.rows_of(states), final_TH.shape[1], wanted.rows, errors, teacher)

    def copy_to_host(self, copy_tensor):
        teacher = self.teacher
        if teacher.packed is not None:
            teacher = replace(teacher, packed=copy_tensor(teacher.packed))
        return _OnHost(copy_tensor(self.states), self.hidden, self.rows, self.layer_errors, teacher)


@dataclass(frozen=True)
class _OnHost:
    """The same on the host (SGLang's HostAuxiliaryOutput); consumed just before responses are streamed."""

    states: torch.Tensor
    hidden: int
    rows: tuple
    layer_errors: tuple | None
    teacher: _Teacher

    def consume(self, batch, commits):
        taken = 0
        for rows in self.rows:
            part = slice(taken, taken + rows.count)
            taken += rows.count
            try:
                if self.teacher.error:
                    raise RuntimeError(self.teacher.error)
                summary = None if self.teacher.packed is None else self.teacher.packed[part]
                handle = _write_chunk(rows, self.states[part], self.hidden, summary, self.teacher.k)
            except Exception as error:  # an exception here would kill the engine: let the request fail alone
                log.exception("capture of request %s failed", rows.req.rid)
                handle = {"error": f"{type(error).__name__}: {error}"}
            if handle is not None:
                handle["layer_errors"] = self.layer_errors
                handle["teacher_errors"] = self.teacher.errors
                rows.req.customized_info = {**(rows.req.customized_info or {}), "statehouse": [handle]}


def _write_chunk(rows, chunk, hidden, summary, k):
    """Append a chunk, and its rows of the teacher summary, to its request's file; the handle when it was the last one."""
    req, ids = rows.req, rows.req.origin_input_ids
    path = Path(os.environ["STATEHOUSE_CAPTURE_DIR"]) / f"{req.rid}.states"
    part = path.with_suffix(".part")
    done, chunks = getattr(req, "_statehouse_progress", (0, 0)) if rows.start else (0, 0)
    if rows.start != done:
        raise RuntimeError(f"chunk begins at token {rows.start}, {done} tokens are captured")
    file = os.open(part, os.O_WRONLY | os.O_CREAT | (0 if rows.start else os.O_TRUNC), 0o600)
    try:
        if rows.start == 0:
            slots = chunk.shape[1] // hidden
            header = HEADER.pack(MAGIC, DTYPES[chunk.dtype], len(ids), slots, hidden, k)
            _write_at(file, memoryview(header + torch.tensor(list(ids), dtype=torch.int32).numpy().tobytes()), 0)
        row_bytes = chunk.shape[1] * chunk.element_size()
        _write_at(file, _bytes(chunk), data_offset(len(ids)) + rows.start * row_bytes)
        if summary is not None:
            behind = _aligned(data_offset(len(ids)) + len(ids) * row_bytes)
            _write_at(file, _bytes(summary), behind + rows.start * 4 * (1 + 2 * k))
    finally:
        os.close(file)
    done, chunks = rows.start + rows.count, chunks + 1
    req._statehouse_progress = (done, chunks)
    if done < len(ids):
        return None
    part.rename(path)
    return {"path": str(path), "tokens": done, "chunks": chunks}


def _bytes(tensor):
    return memoryview(tensor.contiguous().view(torch.uint8).numpy()).cast("B")


def _write_at(file, data, offset):
    while data:  # one call writes 2 GiB at most
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written


# ---- speculation ---------------------------------------------------------------------------------------------------


def _note_pass(result, req, accepted):
    """Remember what a verify pass accepted, in the response's `meta_info["statehouse_passes"]`.

    SGLang streams such lists in step with the tokens: an entry a token, the count at a pass's first token.
    """
    req.customized_info = req.customized_info or {}
    marks = req.customized_info.setdefault("statehouse_passes", [None])  # the first token is the prefill's
    marks += [int(accepted)] + [None] * int(accepted)
