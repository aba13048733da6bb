"""Codecs by name. One file per codec; the name stands in the recipe, the plan and the Zarr metadata."""

from __future__ import annotations

import re

from storage.codecs.bitround import MANTISSA_BITS, BitRound
from storage.codecs.codec import Codec
from storage.codecs.fp8 import Fp8
from storage.codecs.lossless import Lossless
from storage.codecs.raw import Raw
from storage.errors import StatehouseError

CODECS: dict[str, Codec] = {
    codec.name: codec for codec in (Lossless(), Raw(), Fp8(), *(BitRound(keep) for keep in range(1, MANTISSA_BITS)))
}
CODEC_NAMES = f"lossless, raw, bitround(1) to bitround({MANTISSA_BITS - 1}), fp8"


def codec_by_name(name: str) -> Codec:
    """The codec called `name` in a recipe or a plan. Raises StatehouseError that lists the known names."""
    found = CODECS.get(name) or CODECS.get(re.sub(r"\s", "", name))
    if found is None:
        raise StatehouseError(f"codec {name!r} is unknown; expected one of {CODEC_NAMES}")
    return found
