"""Methods and attributes that one object has for a while, in the place of its class's or of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

_ABSENT = object()


@contextlib.contextmanager
def shadowed(instance: Any, attributes: Mapping[str, Any]) -> Iterator[None]:
    """Context in which an object has other methods or attributes of its own."""
    before = {name: vars(instance).get(name, _ABSENT) for name in attributes}
    for name, value in attributes.items():
        setattr(instance, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is _ABSENT:
                delattr(instance, name)
            else:
                setattr(instance, name, value)
