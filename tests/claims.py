"""The table of claims in this folder's README, made from the tests: `python tests/claims.py` writes it anew.

A claim is the first line of a test module's docstring. It ran on the CPU lane, or where the module's constant RAN_ON
says. Modules that test one part of the package have no row, unless they have a RAN_ON.
"""

import ast
from itertools import dropwhile
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS / "README.md"
HEAD = "|claim|ran on|\n|---|---|\n"
WHOLE = (TESTS, TESTS / "sleep", TESTS / "gpu")
"""Folders whose modules train."""


def rows() -> str:
    found = []
    for path in sorted(TESTS.rglob("test_*.py"), key=lambda path: (path.parent, path)):
        module = ast.parse(path.read_text())
        ran_on = [
            ast.literal_eval(node.value)
            for node in module.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "RAN_ON"
        ]
        assert ran_on or path.parent.name != "gpu", f"{path}: say with RAN_ON where it ran"
        if ran_on or path.parent in WHOLE:
            claim = (ast.get_docstring(module) or "").partition("\n")[0].removesuffix(".")
            found.append(f"|[{claim}]({path.relative_to(TESTS)})|{ran_on[0] if ran_on else 'CPU'}|\n")
    return "".join(found)


def page() -> str:
    """Return the page with the table as it should be."""
    before, _, after = PAGE.read_text().partition(HEAD)
    rest = dropwhile(lambda line: line.startswith("|"), after.splitlines(keepends=True))
    return before + HEAD + rows() + "".join(rest)


if __name__ == "__main__":
    PAGE.write_text(page())
