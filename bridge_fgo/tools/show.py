"""Print figures as text, and tables, for all commands."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


@contextlib.contextmanager
def spinner(text: str) -> Iterator[None]:
    """Context in which a terminal shows `text` on standard error; if that is no terminal nothing is written."""
    console = Console(stderr=True)
    with console.status(text) if console.is_terminal else contextlib.nullcontext():
        yield


def tell(console: Console, text: str, style: str | None = None) -> None:
    """Print a text as it is, to be copied: what is in brackets is no markup, and only a terminal wraps its line."""
    console.print(text, markup=False, highlight=False, soft_wrap=True, style=style)


def are_not_installed(packages: Sequence[str]) -> str:
    """Return the sentence that packages are missing."""
    return f"{' and '.join(packages)} {'is' if len(packages) == 1 else 'are'} not installed"


def readable_bytes(count: float | None) -> str:
    """Return a number of bytes in the largest unit in which it has a digit before the point."""
    if count is None:
        return "-"
    unit, size = next((unit for unit in UNITS if abs(count) >= unit[1]), ("B", 1.0))
    return f"{count / size:.2f} {unit}" if size > 1 else f"{count:.0f} B"


def readable_number(value: float | None) -> str:
    """Return a number with nine digits, enough to tell any two fp32 numbers apart."""
    return "-" if value is None else f"{value:.9g}"


def table(title: str, heads: Iterable[str], rows: Iterable[Iterable[str]], bold: str = "", **how: Any) -> Table:
    """Return a table of figures: the first column is text, and the one called `bold` stands out."""
    made = Table(title=title, title_justify="left", **how)
    for place, name in enumerate(heads):
        made.add_column(name, justify="right" if place else "left", style="bold" if name == bold else None)
    for row in rows:
        made.add_row(*row)
    return made
