"""A training run in a bucket: `<dataset.uri>-runs/<name>/`. It names its dataset by fingerprint; a dataset knows no runs.

run.json                 what is trained on what: settings, fingerprints, provenance
checkpoints/<update>/    model.safetensors, optimizer.safetensors, state.json (put last: it commits the checkpoint)
metrics.jsonl            one line an update
drafter/                 config.json, model.safetensors: the finished drafter as SGLang serves it
summary.json             put last of all: the run is finished
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from drafter.errors import DrafterError
from drafter.export import CONFIG, TENSORS, export_sglang
from drafter.model import Drafter
from storage.objects import ObjectMissing, open_store

_DRAFTER = "drafter"


class Run:
    """One run, finished or not. uri: its folder, local or on object storage."""

    def __init__(self, uri: str) -> None:
        self.store = open_store(uri)
        self.uri = self.store.uri

    def put_drafter(self, drafter: Drafter, layer_ids: Sequence[int] | None = None) -> None:
        """The finished drafter, for SGLang. layer_ids: as for `export_sglang`."""
        with tempfile.TemporaryDirectory(prefix="statehouse-export-") as folder:
            export_sglang(drafter, folder, layer_ids=layer_ids)
            for name in (TENSORS, CONFIG):
                self.store.put(f"{_DRAFTER}/{name}", Path(folder, name).read_bytes())

    def fetch_drafter(self, folder: Path) -> Path:
        """Copies the finished drafter into `folder` and returns it. Raises DrafterError when there is none."""
        folder.mkdir(parents=True, exist_ok=True)
        for name in (CONFIG, TENSORS):
            try:
                (folder / name).write_bytes(self.store.get(f"{_DRAFTER}/{name}"))
            except ObjectMissing:
                raise DrafterError(
                    f"{self.uri}/{_DRAFTER}/{name}: no such object: this run has no finished drafter; "
                    "run `python -m ray_jobs.train RECIPE` (it carries on where it stood)"
                ) from None
        return folder
