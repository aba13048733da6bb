"""Every figure that the storage issue names, by the part of `benchmarks.storage` that measures it.

They are all in every report: what a run could not measure stands there as not measured, with the reason.
"""

from __future__ import annotations

# {part: {name: (limit, which side is better, what)}}
BARS: dict[str, dict[str, tuple[float, str, str]]] = {
    "codecs": {
        "over_order_0_bound_synthetic": (1.02, "lower", "lossless over the order-0 bound, synthetic H = 7168"),
        "over_order_0_bound_synthetic_other_offsets": (1.02, "lower", "the same with the offsets of another domain"),
        "over_order_0_bound_real": (1.02, "lower", "lossless over the order-0 bound, states of SmolLM2"),
        "over_order_0_bound_real_other_offsets": (1.02, "lower", "the same of three sources with the fourth's offsets"),
        "stored_over_raw_real_states": (0.675, "lower", "bytes stored / raw bf16, lossless, states of SmolLM2"),
    },
    "reading": {
        "read_over_raw_gets": (0.65, "higher", "GB/s over raw GETs of the same bytes"),
        "read_cpu_over_raw_gets": (2.2, "lower", "CPU over that of raw GETs"),
        "read_over_peers": (2.0, "higher", "GB/s over the better of one GET per torch.save or safetensors file"),
        "read_over_zarr_python": (5.0, "higher", "GB/s over stock zarr-python on the same store"),
        "read_over_tuned_safetensors": (0.9, "higher", "GB/s over safetensors by parallel GETs into a reused buffer"),
    },
    "far_away": {
        "slow_link_over_tuned_safetensors": (1.4, "higher", "tokens/s over tuned safetensors through 200 MB/s"),
        "far_link_over_limit": (
            0.9,
            "higher",
            "GB/s over the bandwidth-delay limit of a link of 200 MB/s that adds 30 ms to each request",
        ),
    },
    "writing": {
        "write_cpu_over_torch_save": (
            1.1,
            "lower",
            "CPU of writing a shard, receipt included, over torch.save of the same states, both PUT to S3",
        ),
    },
    "memory": {
        "stream_memory_over_bound": (
            1.0,
            "lower",
            "resident growth of a 10 GB stream over the bound that stream names",
        ),
    },
    "planning": {
        "plan_seconds": (60, "lower", "planning 1,000,000 sequences of 1.7 billion tokens"),
        "plan_gib": (4, "lower", "peak memory of planning them"),
        "plan_padding": (0.02, "lower", "places of the token axis that no token has"),
    },
    "opening": {
        "open_seconds": (2.0, "lower", "opening a sealed dataset of 1,000,000 sequences in 206,863 shards"),
        "open_requests": (20, "lower", "requests of opening it"),
        "import_seconds": (0.5, "lower", "import storage"),
    },
}
