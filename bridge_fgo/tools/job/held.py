"""What the ranks of a pipeline stage hold beside activations, as plain data: tensors, gradients, optimizer states."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from bridge_fgo.memory.state_tensor import Bundle, Home, State, WeightShard, local
from bridge_fgo.states.source import Source

MXFP8_BYTES = 2 * (1 + 1 / 32)
"""Bytes of a parameter's element in MXFP8: its rows and its columns, each one byte, and one for every 32 (the
microscaling format's block). Without the padding of the scales."""
FP8_BYTES = 2  # of a parameter's element in FP8 with another recipe: the value, in DDP's buffer, and its transpose


@dataclass(frozen=True)
class Tensor:
    """A parameter as one rank holds it, after tensor and expert parallelism."""

    name: str
    numel: int
    dtype: torch.dtype = torch.bfloat16  # of its elements; a quantized tensor has that of its source
    quantized: bool = False  # kept in FP8
    expert: bool = False  # of an expert that not every rank has, so that its states are spread over fewer ranks
    own_bucket: bool = False  # a shared embedding, which mcore gives a bucket of its own
    trainable: bool = True  # has gradients and states


Chunk = list[Tensor]  # the parameters of one model chunk, in the model's order

StateKind = tuple[str, str, str, bool, bool, bool, bool]
"""Of a state its `kind`, `name`, dtype ("float32"), `late`, `written_back`, whether it rounds to bf16 weights, and
whether it lies in a storage that others hold views of."""


@dataclass(frozen=True)
class OptimizerStates:
    """The states of one of mcore's optimizers on a rank: what the engine's source says of them."""

    divides: bool  # whether masters are copied to weights part by part
    kinds: list[list[StateKind]]  # the lists of states that its parameters have
    # For each parameter: the number of its list, and its elements. Where its states lie in a home (`State.home`), also
    # the number of that home, and their first byte in it.
    bundles: list[list[int]]
    homes: list[int]  # bytes of each home

    @classmethod
    def of(cls, source: Source) -> OptimizerStates:
        """Return what a source says of its states."""
        kinds: dict[tuple[StateKind, ...], int] = {}
        homes: dict[Home, int] = {}
        bundles = []
        for bundle in source.states():
            numbers = [kinds.setdefault(tuple(map(_kind, bundle.states)), len(kinds)), local(bundle.param).numel()]
            for state in bundle.states:
                if state.home is not None:
                    numbers += homes.setdefault(state.home, len(homes)), state.offset
            bundles.append(numbers)
        return cls(source.writes_back_by_part, [list(kind) for kind in kinds], bundles, [home.nbytes for home in homes])

    def states(self) -> list[Bundle]:
        """Return the states as the source gave them, on tensors without memory."""
        homes = [Home(nbytes) for nbytes in self.homes]
        found = []
        for kind, numel, *place in self.bundles:
            param = torch.empty(numel, device="meta")
            found.append(Bundle(param, [_state(param, each, homes, place) for each in self.kinds[kind]]))
        return found


def _kind(state: State) -> StateKind:
    dtype = str(state.dtype).removeprefix("torch.")
    rounds, at_home = state.rounds_to is not None, state.home is not None
    return state.kind, state.name, dtype, state.late, state.written_back, rounds, at_home


def _state(param: torch.Tensor, kind: StateKind, homes: list[Home], place: list[int]) -> State:
    of_kind, name, dtype, late, written_back, rounds, at_home = kind
    return State(
        of_kind,
        name,
        param,
        getattr(torch, dtype),
        lambda: None,
        late=late,
        written_back=written_back,
        rounds_to=WeightShard(lambda: param, 0, param.numel()) if rounds else None,
        home=homes[place[0]] if at_home else None,
        offset=place[1] if at_home else 0,
    )


@dataclass(frozen=True)
class Held:
    """Counts the bytes that the ranks of a pipeline stage hold."""

    parameters: int  # of each rank, with the padding of buffers
    gradients: int  # likewise
    gathered: int  # by Megatron-FSDP beside them in forward and backward, at most, and of gradients not reduced yet
    in_step: int  # what of these stays in the optimizer step, and the step's gradients in the masters' dtype
    # For each of DDP's buffers of parameters: the bytes of an element, of the buffer, and of a rank's share of it.
    buffers: list[tuple[int, int, int]]
    optimizers: list[OptimizerStates]  # the states of mcore's optimizers, each once
    ranks: list[list[int]]  # of each rank which of them it has
    # For each of DDP's gradient buckets: the number of its last tensor in the stage, where a backward begins, and its
    # bytes. Empty under Megatron-FSDP.
    buckets: list[tuple[int, int]] = field(default_factory=list)

    @classmethod
    def read(cls, found: dict[str, Any]) -> Held:
        """Return what `dataclasses.asdict` made plain."""
        return cls(**{**found, "optimizers": [OptimizerStates(**each) for each in found["optimizers"]]})

    @property
    def has_masters(self) -> bool:
        """Whether mcore keeps masters, which it rounds to the weights."""
        return any(kind[4] for each in self.optimizers for kinds in each.kinds for kind in kinds)
