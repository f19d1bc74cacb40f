"""The table of verdicts: how many configs there are of each outcome and reason."""

from __future__ import annotations

from collections.abc import Mapping

from bridge_fgo.tools.reach.verdict import Verdict

ORDER = ("accepted", "refused", "Bridge refuses", "not built")


def by_class(verdicts: Mapping[str, Verdict]) -> dict[tuple[str, str], list[str]]:
    """Return the names of each (outcome, reason), in the order of `ORDER` and the most first."""
    classes: dict[tuple[str, str], list[str]] = {}
    for name, verdict in verdicts.items():
        classes.setdefault((verdict.outcome, verdict.reason), []).append(name)
    ordered = sorted(classes, key=lambda key: (ORDER.index(key[0]), -len(classes[key]), key[1]))
    return {key: sorted(classes[key]) for key in ordered}


def table(verdicts: Mapping[str, Verdict], names: int, *, verbose: bool) -> str:
    """Return the table as text.

    Args:
        verdicts: of each config function, by module and name.
        names: how many names Bridge gives these functions.
        verbose: whether the functions and their whole reasons follow each row. What did not
            get as far as this package is named always.
    """
    built = sum(verdict.outcome != "not built" for verdict in verdicts.values())
    lines = [f"{len(verdicts)} config functions under {names} names; {built} build", ""]
    for (outcome, reason), functions in by_class(verdicts).items():
        lines.append(f"{len(functions):5}  {outcome:14}  {reason}".rstrip())
        if verbose or outcome in ("Bridge refuses", "not built"):
            for function in functions:
                lines.append(f"{'':23}{function}")
                lines.extend(f"{'':25}{why}" for why in verdicts[function].reasons)
    return "\n".join(lines) + "\n"
