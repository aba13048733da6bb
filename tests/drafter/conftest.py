from __future__ import annotations

import pytest
import torch
from tiny_training import Tiny, make_tiny

# On a busy machine a second thread waits for its core: matrices of 64 x 64 took 100 times longer with it.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A verifier, a dataset and a draft vocabulary in a folder; runs are of the tests' own names."""
    folder = tmp_path_factory.mktemp("tiny")
    return make_tiny(str(folder), folder)
