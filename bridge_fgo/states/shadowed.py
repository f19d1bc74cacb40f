"""Other attributes of an object for a while."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

ABSENT = object()  # in the place of an attribute that an object has not itself


@contextmanager
def shadowed(instance: Any, attributes: Mapping[str, Any]) -> Iterator[None]:
    """Context in which an object has other methods or attributes, in the place of its class's or of its own."""
    before = {name: vars(instance).get(name, ABSENT) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(instance, name, value)
        yield
    finally:
        for name, value in before.items():
            put_back(instance, name, value)


def replaced(owner: Any, name: str, ours: Any) -> Callable[[], None]:
    """Set an attribute of an object or a class; return what undoes it, unless other code has set it once more."""
    before = vars(owner).get(name, ABSENT)
    setattr(owner, name, ours)

    def undo() -> None:
        if vars(owner).get(name) is ours:
            put_back(owner, name, before)

    return undo


def put_back(owner: Any, name: str, before: Any) -> None:
    """Set an attribute as it was, or delete it if it was `ABSENT`."""
    if before is not ABSENT:
        setattr(owner, name, before)
    elif name in vars(owner):
        delattr(owner, name)
