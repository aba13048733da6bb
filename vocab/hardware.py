"""The GPUs that the roofline knows, with where each number comes from.

Figures are the vendor's peaks for one GPU: dense BF16 with FP32 accumulation (data sheets print the sparse number, twice
as much), memory bandwidth, and the link to another GPU *one way* (data sheets print both ways together). What a server
reaches of them is said apart, in `vocab.roofline.Assumptions`.
"""

from __future__ import annotations

from dataclasses import dataclass

from vocab.errors import VocabError


@dataclass(frozen=True)
class Gpu:
    """One GPU. memory_gb, bandwidth_gbs and link_gbs in 10^9 bytes (a second); bf16_tflops in 10^12 a second, dense.

    link_latency_us: a collective of a few bytes among the GPUs of a node, microseconds.
    """

    name: str
    memory_gb: float
    bandwidth_gbs: float
    bf16_tflops: float
    link_gbs: float
    link_latency_us: float
    source: str

    def __post_init__(self) -> None:
        for field in ("memory_gb", "bandwidth_gbs", "bf16_tflops", "link_gbs"):
            if not getattr(self, field) > 0:
                raise VocabError(
                    f"gpu {self.name}: {field}: expected a number above zero, found {getattr(self, field)}"
                )
        if self.link_latency_us < 0:
            raise VocabError(f"gpu {self.name}: link_latency_us: expected at least 0, found {self.link_latency_us}")


GPUS: dict[str, Gpu] = {
    "rtx-pro-6000": Gpu(
        name="RTX PRO 6000 Blackwell",
        memory_gb=96,
        bandwidth_gbs=1792,
        bf16_tflops=500,
        link_gbs=64,
        link_latency_us=25,
        source="NVIDIA RTX PRO 6000 Blackwell Workstation Edition data sheet: 96 GB GDDR7, 1,792 GB/s, 4,000 AI TOPS "
        "(FP4, sparse; BF16 dense is an eighth), PCIe 5.0 x16 and no NVLink. The Server Edition has 1,597 GB/s",
    ),
    "b200": Gpu(
        name="B200",
        memory_gb=180,
        bandwidth_gbs=8000,
        bf16_tflops=2250,
        link_gbs=900,
        link_latency_us=8,
        source="NVIDIA DGX B200 data sheet, an eighth of the system: 1,440 GB HBM3e, 64 TB/s; HGX B200: 4.5 PFLOPS BF16 "
        "sparse, NVLink 5 1.8 TB/s both ways",
    ),
    "h200": Gpu(
        name="H200 SXM",
        memory_gb=141,
        bandwidth_gbs=4800,
        bf16_tflops=989.5,
        link_gbs=450,
        link_latency_us=8,
        source="NVIDIA H200 Tensor Core GPU data sheet: 141 GB HBM3e, 4.8 TB/s, 1,979 TFLOPS BF16 sparse, "
        "NVLink 4 900 GB/s both ways",
    ),
    "h100": Gpu(
        name="H100 SXM",
        memory_gb=80,
        bandwidth_gbs=3350,
        bf16_tflops=989.5,
        link_gbs=450,
        link_latency_us=8,
        source="NVIDIA H100 Tensor Core GPU data sheet: 80 GB HBM3, 3.35 TB/s, 1,979 TFLOPS BF16 sparse, "
        "NVLink 4 900 GB/s both ways",
    ),
}


def gpu(name: str) -> Gpu:
    """The GPU of this name. Raises VocabError that lists the known ones."""
    if name not in GPUS:
        raise VocabError(f"gpu: expected one of {', '.join(GPUS)}, found {name!r}")
    return GPUS[name]
