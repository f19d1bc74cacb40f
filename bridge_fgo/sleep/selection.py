"""What a call of `Residency` is to move: the names of kinds, and a choice of parameters."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from bridge_fgo.sleep.moved import KINDS, Kind, Kinds
from bridge_fgo.sleep.trainer_memory import TrainerMemory, Unit
from bridge_fgo.sleep.weight_offloader import WeightSlab, Where


class Selection(NamedTuple):
    """The units of this rank that a call moves."""

    units: Sequence[Unit]
    matches: bool = True  # whether `where` holds for a parameter of this rank


def select(memory: TrainerMemory, kinds: Kinds, more: Sequence[Kind] = (), where: Where | None = None) -> Selection:
    """Return what the arguments of a call name.

    Raises:
        ValueError: a name is unknown, or `where` holds for a part of what moves together.
        RuntimeError: the Residency is closed, or the current stream is captured into a CUDA graph.
    """
    memory.require_open()
    # No dictionary of booleans: all its keys would be asked for.
    is_list = isinstance(kinds, Iterable) and not isinstance(kinds, str | Mapping)
    asked = [*(kinds if is_list else [kinds]), *more]
    for word in asked:
        if word not in ("all", *KINDS):
            raise ValueError(
                f"{word!r}: use 'all' or any of {', '.join(map(repr, KINDS))}, as names or as one list of names"
            )
        if word == "optimizer" and memory.states is None:
            raise ValueError("'optimizer' of a Residency that was made with optimizer=None: give it the optimizer")
    if memory.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("nothing can move while the current stream is captured into a CUDA graph")
    found = set(KINDS if "all" in asked else asked)
    if where is not None and "params" not in found:
        raise ValueError(f"where= chooses among 'params', and only {sorted(found)} are asked for: add 'params'")
    slabs, matches = memory.weights.chosen(where) if "params" in found else ([], True)
    others = [unit for unit in memory.units if unit.kind != "params" and unit.kind in found]
    return Selection([*slabs, *others], matches)


def require_match(matches: Iterable[bool]) -> None:
    """Raise ValueError if `where` holds for no parameter on any rank; every rank knows the answers of all."""
    if not any(matches):
        raise ValueError(
            "where= holds for no parameter on any rank: it is called with the names that the model's "
            "named_parameters() have, and with the parameters"
        )


def weights_of(units: Iterable[Unit]) -> list[WeightSlab]:
    """Return the weights among some units."""
    return [unit for unit in units if isinstance(unit, WeightSlab)]
