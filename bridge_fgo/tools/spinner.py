"""Says on standard error what takes long. Where that is no terminal nothing is written."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.console import Console


@contextlib.contextmanager
def spinner(text: str) -> Iterator[None]:
    """Context in which a terminal shows `text` and that something is going on; it is gone afterwards."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(text):
        yield
