"""The verifier's last RMSNorm, for formats that keep the final state on its other side.

Before -> after is the model's own formula. After -> before is impossible (the norm forgets a scale), but dividing by the
weight gives a state whose norm is the stored one again, which is all that a trainer does with it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from storage.convert.safetensors_file import read_header, read_tensor
from storage.errors import StatehouseError
from storage.shard import to_bits

# Twice rounding to bf16 (2**-9 each) and what eps adds; a wrong norm is off by its weights' spread, tens of percent.
_TOLERANCE = 0.01
_SUFFIX = "norm.weight"


@dataclass(frozen=True, eq=False)
class FinalNorm:
    """weight: [H] float32."""

    weight: np.ndarray
    eps: float

    @classmethod
    def from_verifier(cls, folder: str | Path) -> FinalNorm:
        """Reads `model.norm.weight` and `rms_norm_eps` of a checkpoint folder. Raises StatehouseError."""
        folder = Path(folder)
        try:
            config = json.loads((folder / "config.json").read_text())
        except (OSError, ValueError) as error:
            raise StatehouseError(f"{folder}: expected a verifier's folder with config.json ({error})") from None
        config = config.get("text_config", config)
        if "rms_norm_eps" not in config or str(config.get("model_type", "")).startswith("gemma"):
            raise StatehouseError(
                f"{folder}: model type {config.get('model_type')!r} has no plain RMSNorm at its end; convert with a contract "
                "whose final_state is the one the files hold"
            )
        for path in sorted(folder.glob("*.safetensors")):
            header, _ = read_header(path)
            for name in header:
                if name == _SUFFIX or name.endswith(f"model.{_SUFFIX}"):
                    values, dtype = read_tensor(path, name)
                    wide = (values.astype(np.uint32) << 16).view(np.float32) if dtype == "BF16" else values
                    return cls(wide.astype(np.float32), float(config["rms_norm_eps"]))
        raise StatehouseError(
            f"{folder}: no model.{_SUFFIX} in its safetensors files; give the verifier's whole folder"
        )

    def require_size(self, hidden_size: int) -> None:
        if self.weight.shape != (hidden_size,):
            raise StatehouseError(
                f"the verifier's last norm has {self.weight.size} channels, the contract {hidden_size}; give its own verifier"
            )

    def apply(self, bits_TH: np.ndarray) -> np.ndarray:
        """States before the norm -> after it; bf16 bit patterns uint16 [T, H], computed in float32, rounded once."""
        x = bits_TH.view(ml_dtypes.bfloat16).astype(np.float32)
        scale = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True, dtype=np.float32) + np.float32(self.eps))
        return to_bits((x * scale * self.weight).astype(np.float32))

    def unapply(self, bits_TH: np.ndarray, where: str) -> np.ndarray:
        """States after the norm -> states whose norm they are (not those the model had); uint16 [T, H].

        Raises StatehouseError when the norm does not give the stored states back, or has weights that are zero.
        """
        if not self.weight.all():
            raise StatehouseError(f"{where}: the verifier's last norm has zero weights, which cannot be divided out")
        after = bits_TH.view(ml_dtypes.bfloat16).astype(np.float32)
        before = to_bits((after / self.weight).astype(np.float32))
        again = self.apply(before).view(ml_dtypes.bfloat16).astype(np.float32)
        finite = np.isfinite(after).all(-1)
        error = np.linalg.norm((again - after)[finite], axis=-1)
        if (error > _TOLERANCE * np.linalg.norm(after[finite], axis=-1)).any():
            raise StatehouseError(
                f"{where}: dividing by the last norm's weight and normalising again does not give the stored final states "
                f"back (off by up to {float(error.max()):.3g}); is --verifier the verifier of this dataset?"
            )
        return before
