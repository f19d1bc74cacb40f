"""Undo steps that run if a block raises."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def undo_on_error(*steps: Callable[[], object]) -> Iterator[None]:
    """Context that runs all steps, in order, before it raises an error of its block (Ctrl-C too), to undo that."""
    with ExitStack() as stack:
        for step in reversed(steps):
            stack.callback(step)
        yield
        stack.pop_all()
