"""Silences what other packages say while NeMo-Run imports them for `nemorun fgo ...`, which needs none of them.

`nemorun` loads the entry points of every package that has some, Megatron-Bridge's among them, and with it Megatron's
warnings about what is not installed. They are of no use in the process that launches a job: training says them again.
NeMo-Run loads entry points in the order in which the file system lists the packages. Where Megatron-Bridge's comes
first, its warnings are out by then: `PYTHONWARNINGS=ignore nemorun ...`, or `python -m bridge_fgo.recipes.launch`,
which loads no others.
"""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path

OTHERS = ("megatron", "modelopt", "torch", "transformers")


def silence_others(arguments: list[str] | None = None) -> bool:
    """Drop other packages' warnings and all that they log below an error, where this process is `nemorun fgo ...`.

    Args:
        arguments: of the process, its own name first.

    Returns:
        Whether it is.
    """
    name, *words = sys.argv if arguments is None else arguments
    if Path(name).name != "nemorun" or words[:1] != ["fgo"]:
        return False
    for package in OTHERS:
        warnings.filterwarnings("ignore", module=rf"{package}(\.|$)")
        logging.getLogger(package).setLevel(logging.ERROR)
    return True
