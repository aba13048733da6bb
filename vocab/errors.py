"""The one error of this package: what was asked of a count, a curve or a draft vocabulary cannot be given."""

from __future__ import annotations

from storage.errors import StatehouseError


class VocabError(StatehouseError, ValueError):
    """A count, a size, a split or a saved draft vocabulary is not usable; the message says which, why and what to do.

    It is a ValueError too, so that callers who know only numpy's habits catch it.
    """
