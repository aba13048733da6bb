"""The one error of this package: a drafter cannot be made, trained, saved or loaded from what was given."""

from __future__ import annotations

from storage.errors import StatehouseError


class DrafterError(StatehouseError, ValueError):
    """A config, a batch or a checkpoint is not usable; the message says where, what was expected and found, what to do.

    It is a ValueError too, so that pydantic reports it beside the field.
    """
