"""zstd's Huffman stage without its search for matches, through zstandard's cffi backend. Imported when first needed."""

from __future__ import annotations

import numpy as np
from zstandard.backend_cffi import ffi, lib

_PARAMETERS = (
    (lib.ZSTD_c_strategy, lib.ZSTD_fast),
    (lib.ZSTD_c_windowLog, 17),
    (lib.ZSTD_c_hashLog, 6),
    (lib.ZSTD_c_chainLog, 6),
    (lib.ZSTD_c_searchLog, 1),
    (lib.ZSTD_c_minMatch, 7),
    (lib.ZSTD_c_targetLength, 1024),  # for this strategy: the stride of the search
    (lib.ZSTD_c_literalCompressionMode, 1),  # always; by default not with strides
    (lib.ZSTD_c_contentSizeFlag, 1),
)


class Huffman:
    """One context: for one thread."""

    def __init__(self) -> None:
        self._context = ffi.gc(lib.ZSTD_createCCtx(), lib.ZSTD_freeCCtx)
        for name, value in _PARAMETERS:
            if lib.ZSTD_isError(lib.ZSTD_CCtx_setParameter(self._context, name, value)):
                raise ImportError(f"this zstd does not know parameter {name}")
        self._out = np.empty(0, np.uint8)

    def compress(self, plain: np.ndarray) -> bytes:
        """uint8 [n] -> one frame that declares its size. Releases the GIL."""
        if len(self._out) < (most := lib.ZSTD_compressBound(len(plain))):
            self._out = np.empty(most, np.uint8)
        size = lib.ZSTD_compress2(
            self._context, ffi.from_buffer(self._out), len(self._out), ffi.from_buffer(plain), len(plain)
        )
        if lib.ZSTD_isError(size):
            raise ValueError(f"zstd: {ffi.string(lib.ZSTD_getErrorName(size)).decode()}")
        return self._out[:size].tobytes()


Huffman()  # an ImportError now rather than a wrong size later
