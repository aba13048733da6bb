"""SGLang plugin: hand the captured hidden states over through shared memory.

SGLang finds it by the entry point beside it and loads it into each of its processes; it acts in the schedulers, on
attention-TP rank 0. It takes the packed aux states and the post-norm final states of every prefill chunk off the
logits output (so that SGLang neither turns them into lists nor drops all chunks but the last), lets SGLang copy them
to the host on its own stream, and writes them into one file a request:

    $STATEHOUSE_CAPTURE_DIR/<rid>.states = HEADER | token ids int32 [T] | zeros to a multiple of 64 | states [T, L, H]

The response carries `meta_info["statehouse"] = [{"path", "tokens", "chunks", "layer_errors"}]`, or `{"error"}`.
In an engine that serves with a drafter it captures nothing, and notes what each verify pass accepted.
The module imports nothing of the project: it must load where only this folder is on the path.

Works on internals of SGLang 0.5.23; ray_jobs/replicas/sglang.py proves at each start that it still does.
"""

import logging
import os
import struct
from dataclasses import dataclass
from pathlib import Path

import torch

log = logging.getLogger(__name__)

HEADER = struct.Struct("<8sIIII")  # magic, dtype, tokens, slots, hidden size
MAGIC = b"SHSTATE1"
DTYPES = {torch.float32: 0, torch.bfloat16: 1}
ALIGNMENT = 64
PROBE_PREFIX = "canary-"  # requests whose slots are compared with what the next layer read


def data_offset(tokens: int) -> int:
    """Where the states of a file begin."""
    return -(-(HEADER.size + 4 * tokens) // ALIGNMENT) * ALIGNMENT


def register() -> None:
    """Entry point. Does nothing unless a Statehouse replica started this engine."""
    if not os.environ.get("STATEHOUSE_CAPTURE_DIR"):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        _let_deepseek_run_on_torch_native()
        if torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2"):
            _multiply_bf16_in_fp32(HookRegistry, HookType)
    if not os.environ.get("STATEHOUSE_CAPTURE_LAYERS"):  # an engine that serves: nothing is captured
        HookRegistry.register(
            "sglang.srt.managers.schedule_batch.Req.update_spec_correct_drafts_histogram", _note_pass, HookType.AFTER
        )
        return
    HookRegistry.register(
        "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation", _forward, HookType.AROUND
    )
    HookRegistry.register(
        "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch", _seed_each_row, HookType.AFTER
    )
    HookRegistry.register("sglang.srt.layers.sampler.Sampler._sample_from_probs", _sample, HookType.AROUND)


# ---- capture -------------------------------------------------------------------------------------------------------


def _forward(original, worker, batch, *args, **kwargs):
    probe = _LayerProbe.of(worker, batch)
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

    if get_parallel().attn_tp_rank == 0:
        out.auxiliary_device_output = append_auxiliary_output(
            out.auxiliary_device_output, _OnDevice.of(batch, aux_TKH, final_TH, probe)
        )
    return result


@dataclass(frozen=True)
class _Rows:
    """Rows [start, start + count) of a request's states."""

    req: object
    start: int
    count: int


@dataclass(frozen=True)
class _OnDevice:
    """A batch's states before SGLang copies them to the host (its DeviceAuxiliaryOutput)."""

    states: torch.Tensor  # [rows, L * H], the rows of the wanted requests only
    hidden: int
    rows: tuple
    layer_errors: tuple | None

    @classmethod
    def of(cls, batch, aux_TKH, final_TH, probe):
        states = torch.cat((aux_TKH, final_TH.to(aux_TKH.dtype)), dim=1)  # new memory: graphs may reuse the old
        errors = probe.errors(states, final_TH.shape[1]) if probe is not None else None
        lengths = [int(n) for n in batch.extend_lens]
        if sum(lengths) != states.shape[0]:
            raise RuntimeError(f"capture: {states.shape[0]} rows for chunks of {lengths}")
        rows, wanted = [], []
        for req, start, count in zip(batch.reqs, batch.prefix_lens, lengths, strict=True):
            wanted += [bool(req.return_hidden_states)] * count
            if req.return_hidden_states:
                rows.append(_Rows(req, int(start), count))
        if not all(wanted):
            states = states[torch.tensor(wanted, device=states.device)]
        return cls(states, final_TH.shape[1], tuple(rows), errors)

    def copy_to_host(self, copy_tensor):
        return _OnHost(copy_tensor(self.states), self.hidden, self.rows, self.layer_errors)


@dataclass(frozen=True)
class _OnHost:
    """The same on the host (SGLang's HostAuxiliaryOutput); consumed just before responses are streamed."""

    states: torch.Tensor
    hidden: int
    rows: tuple
    layer_errors: tuple | None

    def consume(self, batch, commits):
        taken = 0
        for rows in self.rows:
            chunk = self.states[taken : taken + rows.count]
            taken += rows.count
            try:
                handle = _write_chunk(rows, chunk, self.hidden)
            except Exception as error:  # an exception here would kill the engine: let the request fail alone
                log.exception("capture of request %s failed", rows.req.rid)
                handle = {"error": f"{type(error).__name__}: {error}"}
            if handle is not None:
                handle["layer_errors"] = self.layer_errors
                rows.req.customized_info = {**(rows.req.customized_info or {}), "statehouse": [handle]}


def _write_chunk(rows, chunk, hidden):
    """Append a chunk to its request's file; the handle when it was the last one."""
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
            header = HEADER.pack(MAGIC, DTYPES[chunk.dtype], len(ids), slots, hidden)
            _write_at(file, memoryview(header + torch.tensor(list(ids), dtype=torch.int32).numpy().tobytes()), 0)
        row_bytes = chunk.shape[1] * chunk.element_size()
        data = memoryview(chunk.contiguous().view(torch.uint8).numpy()).cast("B")
        _write_at(file, data, data_offset(len(ids)) + rows.start * row_bytes)
    finally:
        os.close(file)
    done, chunks = rows.start + rows.count, chunks + 1
    req._statehouse_progress = (done, chunks)
    if done < len(ids):
        return None
    part.rename(path)
    return {"path": str(path), "tokens": done, "chunks": chunks}


def _write_at(file, data, offset):
    while data:  # one call writes 2 GiB at most
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written


# ---- proof that slot k is the output of layer v --------------------------------------------------------------------


class _LayerProbe:
    """Records, for one batch, what the attention of layer v + 1 reads and what the last norm puts out.

    The attention of layer v + 1 reads input_layernorm(output of layer v), whole on every tensor-parallel rank: so a
    slot holds the output of layer v if and only if that norm maps it to what was read. (The decoder layers' own
    return values would not do: SGLang keeps the residual beside them.)
    """

    def __init__(self, layers, norm, wanted):
        self.norms = [layers[v + 1].input_layernorm for v in wanted]
        self.seen = [None] * (len(wanted) + 1)
        self.hooks = [
            layers[v + 1].self_attn.register_forward_pre_hook(self._record_input(k), with_kwargs=True)
            for k, v in enumerate(wanted)
        ]
        self.hooks.append(norm.register_forward_hook(self._record_final))

    @classmethod
    def of(cls, worker, batch):
        """The probe of a batch that holds a canary; None for other batches and unknown module trees."""
        if batch is None or not any(str(req.rid).startswith(PROBE_PREFIX) for req in batch.reqs):
            return None
        wanted = [int(layer) for layer in os.environ["STATEHOUSE_CAPTURE_LAYERS"].split(",")]
        for parent in worker.model_runner.model.modules():
            layers, norm = getattr(parent, "layers", None), getattr(parent, "norm", None)
            if isinstance(layers, torch.nn.ModuleList) and isinstance(norm, torch.nn.Module):
                try:
                    return cls(layers, norm, wanted)
                except (AttributeError, IndexError):
                    continue
        return None

    def _record_input(self, k):
        def hook(module, args, kwargs):
            value = kwargs.get("hidden_states")
            if value is None:
                value = next((a for a in args if torch.is_tensor(a) and a.is_floating_point()), None)
            self.seen[k] = value.clone() if torch.is_tensor(value) else None

        return hook

    def _record_final(self, module, args, output):
        value = output[0] if isinstance(output, tuple) else output
        self.seen[-1] = value.clone()

    def remove(self):
        for hook in self.hooks:
            hook.remove()

    def errors(self, states, hidden):
        """Relative L2 error of each slot; None where nothing comparable was seen (CUDA graphs, scattered rows)."""
        errors = []
        for k, slot in enumerate(states.split(hidden, dim=1)):
            expected, found = self.seen[k], slot
            try:
                if k < len(self.norms):
                    found = self.norms[k](slot.contiguous())
                if expected is None or expected.shape != found.shape:
                    raise TypeError("not comparable")
                expected = expected.float()
                errors.append(float((found.float() - expected).norm() / expected.norm()))
            except (TypeError, AttributeError, RuntimeError):
                errors.append(None)
        return tuple(errors)


# ---- speculation ---------------------------------------------------------------------------------------------------


def _note_pass(result, req, accepted):
    """Remember what a verify pass accepted, in the response's `meta_info["statehouse_passes"]`.

    SGLang streams such lists in step with the tokens: an entry a token, the count at a pass's first token.
    """
    req.customized_info = req.customized_info or {}
    marks = req.customized_info.setdefault("statehouse_passes", [None])  # the first token is the prefill's
    marks += [int(accepted)] + [None] * int(accepted)


# ---- sampling ------------------------------------------------------------------------------------------------------


def _seed_each_row(info, cls, batch, *args, **kwargs):
    """Give every row its request's own seed, so that a response does not depend on who shares its batch.

    SGLang does this only under enable_deterministic_inference, which also swaps kernels.
    """
    seeds = [req.sampling_params.sampling_seed for req in batch.reqs]
    info.sampling_seed = torch.tensor([0 if seed is None else seed for seed in seeds], dtype=torch.int64).to(
        info.temperatures.device, non_blocking=True
    )
    return info


def _sample(original, sampler, probs, info, positions, simple):
    """Draw by inverse CDF from one uniform number a row, hashed from its seed and position.

    SGLang's own seeded draw compiles a kernel and hashes every (row, token); its top-p sorts the whole vocabulary.
    What is not asked for here (top-k, min-p, sampling masks) goes to SGLang.
    """
    if info.sampling_mask_batch_indices is not None or info.need_min_p_sampling or info.sampling_seed is None:
        return original(sampler, probs, info, positions, simple)
    uniform_B1 = _uniform(info.sampling_seed, positions)[:, None]
    weights_BK, ids_BK = probs, None
    if info.need_top_p_sampling:
        for width in (1024, probs.shape[1]):  # the most likely ids nearly always hold the nucleus
            weights_BK, ids_BK = probs.topk(min(width, probs.shape[1]), dim=-1)
            mass_BK = weights_BK.cumsum(-1)
            if bool((mass_BK[:, -1:] >= info.top_ps.view(-1, 1)).all()):
                break
        # an id stays when the mass before it is within top_p, so at least one does
        weights_BK = weights_BK.masked_fill(mass_BK - weights_BK > info.top_ps.view(-1, 1), 0.0)
    cdf_BK = weights_BK.double().cumsum(-1)
    drawn_B1 = torch.searchsorted(cdf_BK, uniform_B1 * cdf_BK[:, -1:], right=True).clamp_(max=cdf_BK.shape[1] - 1)
    if ids_BK is not None:
        drawn_B1 = ids_BK.gather(1, drawn_B1)
    if info.is_any_greedy:  # top_k = 1 is how SGLang spells temperature 0
        drawn_B1 = torch.where(info.top_ks.view(-1, 1) == 1, probs.argmax(-1, keepdim=True), drawn_B1)
    return drawn_B1.view(-1).to(torch.int32), None


def _uniform(seed_B, position_B):
    """[B] float64 in [0, 1): splitmix64 of seed and position. int64 arithmetic wraps, as it should."""
    x = seed_B * -7046029254386353131 + (position_B.to(torch.int64) + 1) * -4658895280553007687
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685), (31, 1)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return ((x >> 11) & ((1 << 53) - 1)).double() * 2.0**-53


# ---- engines on a CPU ----------------------------------------------------------------------------------------------


def _let_deepseek_run_on_torch_native():
    """torch_native has no DeepSeek handler, and the default one picks MHA over an MLA cache."""
    from sglang.srt.models.deepseek_common import attention_backend_handler as handler

    handler.AttentionBackendRegistry.register("torch_native", lambda attn, batch: handler.AttnForwardMethod.MLA)


def _multiply_bf16_in_fp32(registry, hooks):
    """Without AVX-512 a bf16 matrix product takes 7 times an fp32 one: multiply in fp32, round the result to bf16.

    The sums are fp32 either way. Costs an fp32 copy of each weight.
    """
    registry.register("sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod.apply", _linear, hooks.AROUND)
    registry.register("sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head", _lm_head, hooks.AROUND)


def _linear(original, method, layer, x, bias=None, *args, **kwargs):
    if x.dtype != torch.bfloat16 or layer.weight.dtype != torch.bfloat16 or args or kwargs:
        return original(method, layer, x, bias, *args, **kwargs)
    bias = None if bias is None else bias.float()
    return torch.nn.functional.linear(x.float(), _fp32_weight(layer), bias).to(torch.bfloat16)


def _lm_head(original, processor, hidden, head, bias=None, **kwargs):
    weight = getattr(head, "weight", None)
    plain = weight is not None and weight.dtype == torch.bfloat16 and bias is None and not hasattr(head, "set_lora")
    if not plain or processor.use_fp32_lm_head:
        return original(processor, hidden, head, bias, **kwargs)
    return torch.nn.functional.linear(hidden.float(), _fp32_weight(head)).to(torch.bfloat16)


def _fp32_weight(module):
    if getattr(module, "_statehouse_fp32", None) is None:
        module._statehouse_fp32 = module.weight.detach().float()
    return module._statehouse_fp32
