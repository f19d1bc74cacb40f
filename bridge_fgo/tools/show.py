"""What reports share: figures as text, tables, and one HTML page that opens from disk, with no network."""

from __future__ import annotations

import base64
import contextlib
import gzip
import html
import zlib
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))

STYLE = """
:root { color-scheme: light dark; --text: #222; --ground: #fff; --line: #ccc; --good: #efe; --bad: #fee }
body { font: 16px/1.45 sans-serif; margin: 2em auto; padding: 0 1em; max-width: 72em;
  color: var(--text); background: var(--ground) }
h1 { font-size: 1.5em; overflow-wrap: anywhere }
h2 { font-size: 1.2em; margin-top: 2em; border-bottom: 1px solid var(--line) }
div.scroll { overflow-x: auto; margin: 1em 0 }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
td, th { border: 1px solid var(--line); padding: 4px 8px; text-align: right }
th { min-width: 5em; max-width: 11em; overflow-wrap: anywhere }
td:first-child, th:first-child { text-align: left }
img { max-width: 100%; height: auto }
p.good, p.bad { padding: 0.6em 1em; border-left: 6px solid #2a2; background: var(--good) }
p.bad { border-color: #c22; background: var(--bad) }
@media (prefers-color-scheme: dark) {
  :root { --text: #ddd; --ground: #1e1e1e; --line: #555; --good: #16301a; --bad: #3a1a1a }
  img { filter: invert(0.88) hue-rotate(180deg) }
}
"""
"""Pictures are drawn on white; in the dark they are turned around, with their colours as they were."""


@contextlib.contextmanager
def reading(path: Path, writer: str) -> Iterator[None]:
    """Context that names a file in the error of its content being broken, or not what `writer` writes."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        why = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path}: broken, or not what {writer} writes ({why})") from error


@contextlib.contextmanager
def spinner(text: str) -> Iterator[None]:
    """Context in which a terminal shows `text` on standard error; where that is no terminal nothing is written."""
    console = Console(stderr=True)
    with console.status(text) if console.is_terminal else contextlib.nullcontext():
        yield


def unit_of(nbytes: float) -> tuple[str, float]:
    """Return the largest unit of bytes in which a number has a digit before the point, and the unit's bytes."""
    return next(((name, size) for name, size in UNITS if abs(nbytes) >= size), ("B", 1.0))


def readable_bytes(count: float | None) -> str:
    """Return a number of bytes in its `unit_of`."""
    if count is None:
        return "-"
    unit, size = unit_of(count)
    return f"{count / size:.2f} {unit}" if size > 1 else f"{count:.0f} B"


def readable_number(value: float | None) -> str:
    """Return a number with nine digits, enough to tell any two fp32 numbers apart."""
    return "-" if value is None else f"{value:.9g}"


def print_table(console: Console, cells: list[list[str]]) -> None:
    """Print cells as a table; the first row is the head."""
    table = Table(*cells[0])
    for row in cells[1:]:
        table.add_row(*row)
    console.print(table)


def print_parts(console: Console, parts: dict[str, bool], how: str = "") -> None:
    """Print which compared parts are equal, by name. how: said after "Bitwise equal" where all of them are."""
    told = ", ".join(f"{name} {'equal' if equal else 'DIFFERENT'}" for name, equal in parts.items())
    if all(parts.values()):
        console.print(f"[bold green]Bitwise equal[/]{how}: {told}.")
    else:
        console.print(f"[bold red]NOT bitwise equal[/]: {told}.")


def write_page(path: Path, title: str, parts: list[str]) -> None:
    """Write a page of the HTML `parts`, which the functions below make."""
    path.write_text(
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style>'
        f"<h1>{html.escape(title)}</h1>\n" + "\n".join(parts) + "</html>\n",
        encoding="utf-8",
    )


def heading(text: str) -> str:
    """Return a heading."""
    return f"<h2>{html.escape(text)}</h2>"


def paragraph(text: str) -> str:
    """Return a paragraph of plain text."""
    return f"<p>{html.escape(text)}</p>"


def verdict(text: str, is_good: bool) -> str:
    """Return a paragraph that stands out, in a colour for good or for bad."""
    return f'<p class="{"good" if is_good else "bad"}">{html.escape(text)}</p>'


def table(rows: list[list[str]]) -> str:
    """Return a table; its first row is the head."""

    def cells(row: list[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>"

    body = cells(rows[0], "th") + "".join(cells(row, "td") for row in rows[1:])
    return f'<div class="scroll"><table>{body}</table></div>'


def picture(path: Path) -> str:
    """Return a PNG, put into the page; its file name is what a reader without pictures gets."""
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<p><img alt="{html.escape(path.stem)}" src="data:image/png;base64,{data}"></p>'
