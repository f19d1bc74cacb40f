"""Which engine serves an optimizer: what hangs on one of mcore's optimizers while one does."""

from __future__ import annotations

from typing import Any, NamedTuple

from bridge_fgo.engines.engine import Engine
from bridge_fgo.states.source import Source

ATTACHED = "_bridge_fgo_attached"
"""Attribute of an optimizer that holds its `Attachment`."""


class Attachment(NamedTuple):
    """What an optimizer is attached to: the engine, and the source that it is to it."""

    engine: Engine
    source: Source


def attachment_of(optimizer: Any) -> Attachment | None:
    """Return what an optimizer is attached to, or None."""
    return vars(optimizer).get(ATTACHED)
