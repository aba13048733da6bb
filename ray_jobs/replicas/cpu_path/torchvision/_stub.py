"""Stand-in for torchvision where PyPI's does not load beside a CPU torch: text models import it and never call it."""

import enum

VERSION = "0.28.0"


class InterpolationMode(enum.Enum):
    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


class ImageReadMode(enum.Enum):
    UNCHANGED = 0
    GRAY = 1
    GRAY_ALPHA = 2
    RGB = 3
    RGB_ALPHA = 4


def make(module):
    """A module-level __getattr__: any name imports, calling it raises."""

    def __getattr__(name):
        if name.startswith("__"):
            raise AttributeError(name)
        if name in ("InterpolationMode", "ImageReadMode"):
            return globals()[name]

        def missing(*args, **kwargs):
            raise RuntimeError(f"{module}.{name}: this torchvision is a stand-in for text models")

        return missing

    return __getattr__
