"""The hidden-state store: planned, then filled, then sealed. See docs/dataset-format.md.

>>> import storage
>>> dataset = storage.open_dataset("s3://bucket/datasets/kimi-k25")  # doctest: +SKIP
>>> states = dataset.read(0)  # doctest: +SKIP
"""

from storage.contract import Contract
from storage.errors import StatehouseError
from storage.reader import Dataset, find_datasets, open_dataset
from storage.sequences import Sequence
from storage.states import States

__all__ = ["Contract", "Dataset", "Sequence", "StatehouseError", "States", "find_datasets", "open_dataset"]
