"""Prints what this package says of every config that the installed Megatron-Bridge ships, on a machine without a GPU.

    python -m bridge_fgo.tools.reach [--verbose]

Takes less than a minute, most of it to import Bridge.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
import warnings

from bridge_fgo.tools.reach.functions import config_functions
from bridge_fgo.tools.reach.table import table
from bridge_fgo.tools.reach.verdict import verdict_of, without_hugging_face
from bridge_fgo.tools.standins.cuda import without_gpu
from bridge_fgo.tools.standins.hollow import import_bridge


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="just reach", description=__doc__)
    parser.add_argument("--verbose", action="store_true", help="print the functions and the whole reasons too")
    verbose = parser.parse_args().verbose
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    with contextlib.redirect_stdout(sys.stderr):  # Bridge prints what it turns on
        import_bridge()
        functions = config_functions()
        with without_gpu(), without_hugging_face():
            verdicts = {f"{function.__module__}.{function.__name__}": verdict_of(function) for function in functions}
    assert len(verdicts) == len(functions), "two functions of one name and module"
    names = sum(map(len, functions.values()))
    sys.stdout.write(table(verdicts, names, verbose=verbose))


if __name__ == "__main__":
    main()
