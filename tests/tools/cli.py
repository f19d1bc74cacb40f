"""Commands of `bridge-fgo`, run in this process, and the tables that they print."""

import json
import re

from typer.testing import CliRunner

from bridge_fgo.tools.main import app


def invoke(*words):
    """Run a command; return click's result, of one that has ended by an exit."""
    done = CliRunner().invoke(app, [*map(str, words)])
    assert isinstance(done.exception, SystemExit | None), repr(done.exception)
    return done


def run(*words):
    """Run a command; return its status and all that it printed, in one line."""
    done = invoke(*words)
    return done.exit_code, " ".join(done.output.split())


def told(*words):
    """Run a command with `--json`; return its status and the object that it printed."""
    done = invoke(*words, "--json")
    return done.exit_code, json.loads(done.stdout)


def cells(text):
    """Return the rows of tables in a text, by their cells."""
    rows = [[cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in text.splitlines()]
    return [row for row in rows if row]
