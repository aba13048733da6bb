"""What the plugin changes in how SGLang computes: seeds and draws of its own, and how it runs without a GPU."""

import torch


def seed_each_row(info, cls, batch, *args, **kwargs):
    """Give every row its request's own seed, so that a response does not depend on who shares its batch.

    SGLang does this only under enable_deterministic_inference, which also swaps kernels.
    """
    seeds = [req.sampling_params.sampling_seed for req in batch.reqs]
    info.sampling_seed = torch.tensor([0 if seed is None else seed for seed in seeds], dtype=torch.int64).to(
        info.temperatures.device, non_blocking=True
    )
    return info


def sample(original, sampler, probs, info, positions, simple):
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


def let_deepseek_run_on_torch_native():
    """torch_native has no DeepSeek handler, and the default one picks MHA over an MLA cache."""
    from sglang.srt.models.deepseek_common import attention_backend_handler as handler

    handler.AttentionBackendRegistry.register("torch_native", lambda attn, batch: handler.AttnForwardMethod.MLA)


def multiply_bf16_in_fp32(registry, hooks):
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
