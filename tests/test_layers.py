"""Imports run one way: a layer imports itself and what is below it, also in functions and for types alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = (
    ("cli",),
    ("recipes",),
    ("harness",),
    ("standins",),
    ("wiring",),
    ("engines",),
    ("sources",),
    ("core",),
    ("config", "options"),
)
"""Modules and packages of bridge_fgo, from the top down. What is not listed here may be imported by all."""

LEVELS = {name: level for level, names in enumerate(LAYERS) for name in names}


def files(name: str) -> list[Path]:
    folder = ROOT / "recipes" if name == "recipes" else ROOT / "bridge_fgo" / name
    return sorted(folder.rglob("*.py")) or [path for path in [folder.with_suffix(".py")] if path.exists()]


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each import of a module of bridge_fgo, below `bridge_fgo`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            assert node.level == 0, f"{path}:{node.lineno} is relative"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        yield from ((node.lineno, name.split(".")[1]) for name in names if name.startswith("bridge_fgo."))


@pytest.mark.parametrize("name", [name for name in LEVELS if files(name)])
def test_a_layer_imports_no_layer_above_it(name: str) -> None:
    up = [
        f"{path.relative_to(ROOT)}:{line} imports {other}"
        for path in files(name)
        for line, other in imported(path)
        if LEVELS.get(other, len(LAYERS)) < LEVELS[name]
    ]
    assert up == []
