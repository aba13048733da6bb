"""Golden cos and sin of every RoPE type from SGLang's own `get_rope`, as its Llama drafter calls it.

SGLANG_USE_CPU_ENGINE=1 PYTHONPATH=ray_jobs/replicas/cpu_path python tests/drafter/golden/rope.py tests/drafter/golden
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import sglang
import torch
from safetensors.torch import save_file
from sglang.srt.layers.rotary_embedding import get_rope
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

HEAD_DIM, MAX_POSITIONS = 32, 256
POSITIONS = [0, 1, 2, 17, 100, 255]
# RoPE base, scaling
CASES: dict[str, tuple[float, dict | None]] = {
    "default": (10_000.0, None),
    "linear": (10_000.0, {"rope_type": "linear", "factor": 4.0}),
    "dynamic": (10_000.0, {"rope_type": "dynamic", "factor": 2.0}),
    "llama3": (
        500_000.0,
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 64},
    ),
    "yarn": (10_000.0, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}),
    "yarn_without_original": (10_000.0, {"rope_type": "yarn", "factor": 4.0}),
    "yarn_kimi": (
        50_000.0,
        {"type": "yarn", "factor": 64.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
         "original_max_position_embeddings": 64},
    ),
    "yarn_mscales": (
        50_000.0,
        {"rope_type": "yarn", "factor": 16.0, "mscale": 1.0, "mscale_all_dim": 0.5, "attn_factor": 1.25,
         "original_max_position_embeddings": 64, "beta_fast": 16, "beta_slow": 2},
    ),
    "yarn_not_truncated": (
        150_000.0,
        {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 128},
    ),
}  # fmt: skip

if __name__ == "__main__":
    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy", device="cpu"))
    found = {}
    for name, (theta, scaling) in CASES.items():
        if scaling and "type" in scaling:
            scaling = {"rope_type": scaling["type"], **scaling}
        rope = get_rope(HEAD_DIM, HEAD_DIM, MAX_POSITIONS, theta, True, scaling, dtype=torch.float32)
        found[name] = rope.cos_sin_cache[POSITIONS].float().contiguous()
    about = {"head_dim": HEAD_DIM, "max_positions": MAX_POSITIONS, "positions": POSITIONS, "cases": CASES}
    save_file(found, Path(sys.argv[1], "rope.safetensors"), {"about": json.dumps(about), "sglang": sglang.__version__})
    print({name: list(value.shape) for name, value in found.items()})
