"""Codecs by name. One file per codec; the name stands in the recipe, the plan and the Zarr metadata."""

from __future__ import annotations

from storage.codecs.codec import Codec
from storage.codecs.lossless import Lossless
from storage.codecs.raw import Raw
from storage.errors import StatehouseError

CODECS: dict[str, Codec] = {codec.name: codec for codec in (Lossless(), Raw())}


def codec_by_name(name: str) -> Codec:
    """Raises StatehouseError that lists the known names."""
    if name not in CODECS:
        raise StatehouseError(f"codec {name!r} is unknown; expected one of {', '.join(CODECS)}")
    return CODECS[name]
