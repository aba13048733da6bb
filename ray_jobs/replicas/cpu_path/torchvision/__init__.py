from torchvision._stub import VERSION as __version__  # noqa: F401
from torchvision._stub import make

__getattr__ = make("torchvision")
