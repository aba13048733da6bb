"""Verifier engines behind one interface (replica.py): SGLang, and transformers as the oracle."""

from collections.abc import Sequence
from pathlib import Path

from ray_jobs.replicas.replica import Replica, ReplicaConfig


def open_replica(config: ReplicaConfig, folder: Path, capture_layers: Sequence[int]) -> Replica:
    """The replica that `config` names, not started. folder: a verifier on disk (ray_jobs.verifier)."""
    layers = tuple(int(layer) for layer in capture_layers)
    if config.engine == "transformers":
        from ray_jobs.replicas.transformers import TransformersReplica

        return TransformersReplica(config, Path(folder), layers)
    from ray_jobs.replicas.sglang import SGLangReplica

    return SGLangReplica(config, Path(folder), layers)
