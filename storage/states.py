"""One sequence as a reader hands it over."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from storage.teacher import TeacherSummary

if TYPE_CHECKING:
    import torch


def _no_teacher() -> TeacherSummary | None:
    return None


def _given(teacher: TeacherSummary | None) -> TeacherSummary | None:
    return teacher


@dataclass(frozen=True, eq=False)
class States:
    """One sequence as it was extracted.

    token_ids: [T] int32. loss_mask: [T] bool. hidden: [T, L, H] ml_dtypes.bfloat16: the captured layers in ascending
    order, then the final state.
    """

    id: str
    source: str
    group: str
    token_ids: np.ndarray
    loss_mask: np.ndarray
    hidden: np.ndarray
    read_teacher: Callable[[], TeacherSummary | None] = field(default=_no_teacher, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """Sent elsewhere, it takes its summary along: there it would open the dataset anew."""
        teacher = functools.partial(_given, self.teacher)
        return States, (self.id, self.source, self.group, self.token_ids, self.loss_mask, self.hidden, teacher)

    @cached_property
    def teacher(self) -> TeacherSummary | None:
        """The verifier's next-token distribution in short, read when first asked for; None where there is none."""
        return self.read_teacher()

    @property
    def argmax(self) -> np.ndarray | None:
        """[T] int32: the id that the verifier finds likeliest after each token."""
        return None if self.teacher is None else self.teacher.argmax

    @property
    def logsumexp(self) -> np.ndarray | None:
        """[T] float32, of the logits after each token."""
        return None if self.teacher is None else self.teacher.logsumexp

    def torch(self) -> torch.Tensor:
        """`hidden` as a torch.bfloat16 tensor on the same memory."""
        import torch

        return torch.from_numpy(self.hidden.view(np.int16)).view(torch.bfloat16)
