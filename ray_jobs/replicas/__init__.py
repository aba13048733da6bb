"""Verifier engines behind one interface (replica.py): SGLang, and transformers as the oracle."""

from collections.abc import Sequence
from pathlib import Path

from ray_jobs.replicas.replica import Replica, ReplicaConfig


def open_replica(config: ReplicaConfig, folder: Path, capture_layers: Sequence[int], teacher: str = "none") -> Replica:
    """The replica that `config` names, not started. folder: a verifier on disk (ray_jobs.verifier).

    teacher: the kind of summary that `forward` gives of each token (storage.teacher).
    """
    layers = tuple(int(layer) for layer in capture_layers)
    if config.engine == "transformers":
        from ray_jobs.replicas.transformers import TransformersReplica

        return TransformersReplica(config, Path(folder), layers, teacher)
    from ray_jobs.replicas.sglang import SGLangReplica

    return SGLangReplica(config, Path(folder), layers, teacher)
