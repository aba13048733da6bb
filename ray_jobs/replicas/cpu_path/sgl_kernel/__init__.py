"""Stand-in in plain torch for the CPU operations that SGLang 0.5.23 imports from `sgl_kernel`.

The wheel on PyPI carries CUDA code only; SGLang's CPU kernels are built from source. This folder is put on an engine's
path only where there is no GPU, and never installed. Contents: bookkeeping of the KV cache, what EAGLE3 speculation
needs, and the two attention operations behind the backend "intel_amx".

`convert_weight_packed` is deliberately absent: SGLang then believes that there is no AMX and takes `forward_native`
in every layer.

Shapes: B requests, T query tokens of all requests, N keys of one request, h query heads, g KV heads, d head size.
"""

import ctypes

import torch
import torch.nn.functional as F

__version__ = "0.4.10"  # what SGLang 0.5.23 asks for


# ---- KV cache bookkeeping ------------------------------------------------------------------------------------------


def _spans(req_pool_indices, starts, ends):
    """(row, start, end, offset) of each request, offset counting the tokens before it."""
    offset = 0
    for row, start, end in zip(req_pool_indices.tolist(), starts.tolist(), ends.tolist(), strict=True):
        yield row, start, end, offset
        offset += end - start


def assign_req_to_token_pool_cpu(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len):
    for row, start, end, offset in _spans(req_pool_indices, start_offset, end_offset):
        req_to_token[row, start:end] = out_cache_loc[offset : offset + end - start].to(req_to_token.dtype)


def assign_extend_cache_locs_cpu(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len):
    for row, start, end, offset in _spans(req_pool_indices, start_offset, end_offset):
        out_cache_loc[offset : offset + end - start] = req_to_token[row, start:end].to(out_cache_loc.dtype)


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices, req_to_token, seq_lens, out_cache_loc, pool_len, topk, num_steps
):
    count = topk * num_steps
    for i, (row, start) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        out_cache_loc[i * count : (i + 1) * count] = req_to_token[row, start : start + count].to(out_cache_loc.dtype)


def copy_all_layer_kv_cache_cpu(data_ptrs, strides, tgt_loc, src_loc):
    targets, sources = tgt_loc.tolist(), src_loc.tolist()
    for pointer, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(pointer + source * stride, stride) for source in sources]  # all reads before a write
        for target, row in zip(targets, rows, strict=True):
            ctypes.memmove(pointer + target * stride, row, stride)


# ---- EAGLE3 speculation --------------------------------------------------------------------------------------------


def rotate_input_ids_cpu(input_ids, extend_start_loc, extend_seq_lens, topk_index, select_index=None):
    for i, (start, count) in enumerate(zip(extend_start_loc.tolist(), extend_seq_lens.tolist(), strict=True)):
        if count > 0:
            input_ids[start : start + count - 1] = input_ids[start + 1 : start + count].clone()
            last = start + count - 1 if select_index is None else int(select_index[i])
            input_ids[last] = topk_index.view(-1)[i]


def fill_bonus_tokens_cpu(accept_tokens, accept_lens, bonus_tokens, accept_stride):
    rows = torch.arange(accept_lens.numel(), device=accept_lens.device) * accept_stride
    bonus_tokens.copy_(accept_tokens.view(-1)[rows + accept_lens.long() - 1])


def fill_accept_out_cache_loc_cpu(accept_index, out_cache_loc, accept_out_cache_loc):
    accepted = accept_index.view(-1)
    accepted = accepted[accepted >= 0].long()
    accept_out_cache_loc[: accepted.numel()] = out_cache_loc[accepted]


def build_draft_decode_metadata_cpu(req_to_token, req_pool_indices, seq_lens, topk, num_steps, pool_len):
    """[B * topk, pool_len]: the cache slots of each draft branch, prefix first, its own draft tokens behind."""
    tables = req_to_token.new_zeros((req_pool_indices.numel() * topk, pool_len))
    for b, (row, prefix) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        for branch in range(topk):
            table, begin = tables[b * topk + branch], prefix + branch * num_steps
            table[:prefix] = req_to_token[row, :prefix]
            table[prefix : prefix + num_steps] = req_to_token[row, begin : begin + num_steps]
    return tables


def build_tree_kernel_efficient_cpu(
    parent_list,
    selected_index,
    verified_seq_len,
    tree_mask,
    positions,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    topk,
    depth,
    draft_token_num,
    tree_mask_mode,
):
    """Lay out each request's draft tree: who follows whom, who may attend to whom, at which position."""
    count = draft_token_num
    only_drafts, packed_mask = 1, 2
    if int(tree_mask_mode) == packed_mask:
        raise NotImplementedError("sgl_kernel stand-in: bit-packed tree masks")
    written = 0
    for b, prefix in enumerate(verified_seq_len.tolist()):
        selected = selected_index[b].tolist()
        parents = parent_list[b].tolist() if parent_list.numel() else []
        node_of = {token: node + 1 for node, token in reversed(list(enumerate(selected)))}
        parent = [-1] + [0 if s // topk == 0 else node_of.get(parents[s // topk]) for s in selected]

        child, sibling = [-1] * count, [-1] * count
        for node in range(count - 1, 0, -1):  # later siblings hang behind earlier ones
            if parent[node] is not None:
                sibling[node], child[parent[node]] = child[parent[node]], node
        retrive_index[b] = torch.arange(b * count, (b + 1) * count)
        retrive_next_token[b] = torch.tensor(child)
        retrive_next_sibling[b] = torch.tensor(sibling)

        sees = torch.zeros(count, count, dtype=torch.bool)
        for node in range(count):
            sees[node, 0] = True
            steps, ancestor = 0, node
            while ancestor not in (0, None) and steps < depth:
                sees[node, ancestor] = True
                steps, ancestor = steps + 1, parent[ancestor]
            positions[b * count + node] = prefix + steps
        if int(tree_mask_mode) == only_drafts:
            tree_mask[b * count * count : (b + 1) * count * count] = sees.flatten().to(tree_mask.dtype)
        else:
            whole = torch.cat([torch.ones(count, prefix, dtype=torch.bool), sees], 1)
            tree_mask[written : written + whole.numel()] = whole.flatten().to(tree_mask.dtype)
            written += whole.numel()


def verify_tree_greedy_cpu(
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    target_predict,
):
    """Walk each tree along the verifier's own choices; the token after the last accepted one is the bonus."""
    target = target_predict.reshape(-1).tolist()
    for b in range(candidates.shape[0]):
        tokens, index = candidates[b].tolist(), retrive_index[b].tolist()
        child, sibling = retrive_next_token[b].tolist(), retrive_next_sibling[b].tolist()
        node, last, accepted = 0, index[0], 0
        accept_index[b, 0] = last
        for _ in range(1, accept_index.shape[1]):
            want, node = target[last], child[node]
            while node != -1 and tokens[node] != want:
                node = sibling[node]
            if node == -1:
                break
            predicts[last] = want
            accepted, last = accepted + 1, index[node]
            accept_index[b, accepted] = last
        accept_token_num[b] = accepted
        predicts[last] = target[last]


# ---- attention -----------------------------------------------------------------------------------------------------


def _attend(q_Thd, k_Ngd, v_Ngd, scale, cap, mask, causal=False):
    """One request's attention, [T, h, d]. mask: [T, N] bool, True where a key is visible."""
    q, k, v = q_Thd.transpose(0, 1), k_Ngd.transpose(0, 1), v_Ngd.transpose(0, 1)
    if (group := q.shape[0] // k.shape[0]) > 1:
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    if cap <= 0:
        out = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask, scale=scale, is_causal=causal)
        return out[0].transpose(0, 1)
    scores = torch.matmul(q.float(), k.float().transpose(1, 2)) * scale
    scores = cap * torch.tanh(scores / cap)
    if causal:
        mask = torch.ones(scores.shape[1:], dtype=torch.bool).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return torch.matmul(scores.softmax(-1), v.float()).to(q.dtype).transpose(0, 1)


def _visible(queries, keys, window):
    """[queries, keys] bool: the queries are the last positions, each sees what lies before it (within a window)."""
    query = torch.arange(keys - queries, keys)[:, None]
    key = torch.arange(keys)[None]
    visible = key <= query
    return visible & (key > query - window) if window > 0 else visible


def _extend(
    q,
    k,
    v,
    o,
    k_buffer,
    v_buffer,
    k_scale,
    v_scale,
    req_to_token,
    req_pool_indices,
    seq_lens,
    extend_seq_lens,
    extend_start_loc,
    max_len_extend,
    scale,
    cap,
    is_cross_attn,
    window,
    encoder_lens,
    sinks,
    tree_mask,
    causal,
):
    """Prefill and tree verification: keys and values are in the cache already. o is written in place."""
    if is_cross_attn or sinks is not None:
        raise NotImplementedError("sgl_kernel stand-in: cross attention, attention sinks")
    lengths = zip(
        req_pool_indices.tolist(),
        seq_lens.tolist(),
        extend_seq_lens.tolist(),
        extend_start_loc.tolist(),
        strict=True,
    )
    for i, (row, keys, queries, start) in enumerate(lengths):
        if queries == 0:
            continue
        chunk = slice(start, start + queries)
        whole = keys == queries and k is not None  # no prefix: take k and v as they come, the cache holds the same
        if whole:
            kk, vv = k[chunk], v[chunk]
            if kk.dim() == 2:
                kk, vv = kk.view(queries, *k_buffer.shape[1:]), vv.view(queries, *v_buffer.shape[1:])
        elif k is not None and k.dim() == 3 and k.shape[1:] != k_buffer.shape[1:]:
            # DeepSeek's MHA prefill: k and v come expanded, the cache holds the MLA latent
            raise NotImplementedError("sgl_kernel stand-in: expanded k and v behind a cached prefix")
        else:
            slots = req_to_token[row, :keys].long()
            kk, vv = k_buffer[slots].to(q.dtype), v_buffer[slots].to(q.dtype)
        mask, simple = None, False
        if causal and tree_mask is not None:
            mask = torch.ones(queries, keys, dtype=torch.bool)
            own = tree_mask.view(-1)[i * queries * queries : (i + 1) * queries * queries]
            mask[:, keys - queries :] = own.view(queries, queries).bool()
        elif causal:
            simple = keys == queries and not 0 < window < keys
            mask = None if simple else _visible(queries, keys, window)
        o[chunk] = _attend(q[chunk], kk, vv, scale, cap, mask, causal=simple)


def _decode(
    q_Bhd,
    k_buffer,
    v_buffer,
    k_scale,
    v_scale,
    o,
    k,
    v,
    loc,
    attn_logits,
    req_to_token,
    req_pool_indices,
    seq_lens,
    scale,
    cap,
    is_cross_attn,
    window,
    encoder_lens,
    sinks,
):
    """One token a request: write its k and v into the cache, attend to all before it. o is written in place."""
    if is_cross_attn or sinks is not None:
        raise NotImplementedError("sgl_kernel stand-in: cross attention, attention sinks")
    if k is not None:
        k_buffer[loc] = k.view(-1, *k_buffer.shape[1:]).to(k_buffer.dtype)
        v_buffer[loc] = v.view(-1, *v_buffer.shape[1:]).to(v_buffer.dtype)
    B, h, d = q_Bhd.shape
    if B > 1 and cap <= 0:  # one padded call instead of a loop over requests: twice the tokens per second at B = 64
        longest = int(seq_lens.max())
        position, length = torch.arange(longest)[None], seq_lens[:, None]
        visible_BN = position < length
        if window > 0:
            visible_BN = visible_BN & (position >= length - window)
        slots_BN = req_to_token[req_pool_indices.long(), :longest].long().masked_fill(position >= length, 0)
        k_BgNd = k_buffer[slots_BN].to(q_Bhd.dtype).transpose(1, 2)
        v_BgNd = v_buffer[slots_BN].to(q_Bhd.dtype).transpose(1, 2)
        g = k_BgNd.shape[1]
        # the query heads of one KV head lie along the query axis: no copy of k and v for each
        out = F.scaled_dot_product_attention(
            q_Bhd.view(B, g, h // g, d), k_BgNd, v_BgNd, attn_mask=visible_BN[:, None, None], scale=scale
        )
        o.copy_(out.reshape(B, h, v_BgNd.shape[-1]))
        return
    for i, (row, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        first = max(0, length - window) if window > 0 else 0
        slots = req_to_token[row, first:length].long()
        kk, vv = k_buffer[slots].to(q_Bhd.dtype), v_buffer[slots].to(q_Bhd.dtype)
        o[i : i + 1] = _attend(q_Bhd[i : i + 1], kk, vv, scale, cap, None)


_library = torch.library.Library("sgl_kernel", "FRAGMENT")
_library.define(
    "extend_attention_cpu(Tensor q, Tensor? k, Tensor? v, Tensor(a!) o, Tensor k_buffer, Tensor v_buffer, "
    "float k_scale, float v_scale, Tensor req_to_token, Tensor req_pool_indices, Tensor seq_lens, "
    "Tensor extend_seq_lens, Tensor extend_start_loc, int max_len_extend, float scale, float cap, bool is_cross_attn, "
    "int window, Tensor? encoder_lens, Tensor? sinks, Tensor? tree_mask, bool causal) -> ()"
)
_library.define(
    "decode_attention_cpu(Tensor q, Tensor(a!) k_buffer, Tensor(b!) v_buffer, float k_scale, float v_scale, "
    "Tensor(c!) o, Tensor? k, Tensor? v, Tensor loc, Tensor attn_logits, Tensor req_to_token, Tensor req_pool_indices, "
    "Tensor seq_lens, float scale, float cap, bool is_cross_attn, int window, Tensor? encoder_lens, Tensor? sinks) "
    "-> ()"
)
_library.impl("extend_attention_cpu", _extend, "CPU")
_library.impl("decode_attention_cpu", _decode, "CPU")


def __getattr__(name):
    """Whatever else SGLang imports by name can be imported, and says so when called."""
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel stand-in: {name} has no CPU version here")

    missing.__name__ = name
    return missing
