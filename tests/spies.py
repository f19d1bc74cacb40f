"""Something that happens before a call of a method in a test: it is noted, or fails. patch: a monkeypatch."""

import functools


def before(patch, owner, name, act):
    """Have `act` be called with a method's arguments before each call of it."""
    method = getattr(owner, name)

    @functools.wraps(method)
    def call(*of, **how):
        act(*of, **how)
        return method(*of, **how)

    patch.setattr(owner, name, call)


def note(patch, seen, owner, name, what):
    """Append `what`, or what it returns of the arguments, before each call of a method."""
    before(patch, owner, name, lambda *of, **how: seen.append(what(*of, **how) if callable(what) else what))


def fail(patch, owner, name, error, call=2):
    """Have a call of a method fail, by default the second."""
    calls = []

    def count(*of, **how):
        calls.append(of)
        if len(calls) == call:
            raise error("there was a fault")

    before(patch, owner, name, count)
