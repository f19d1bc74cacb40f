"""The record of a run: events as JSON, one a line, and digests of the final state."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


DIGEST_THREADS = 8


class EventWriter:
    """Appends events to a file, each a line of JSON that is on disk when the call returns.

    JSON has no NaN or infinity: such a number is null, and the field `<name>_hex` keeps it exactly.
    """

    def __init__(self, path: Path | str) -> None:
        self._file = open(path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115 (lives as long as the run)

    def start(self, device: str) -> None:
        """Write the first event: where the arm runs ("cpu", or the GPU's name) and on which versions."""
        distributions = {"bridge": "megatron-bridge", "mcore": "megatron-core", "torch": "torch"}
        versions = {name: metadata.version(wheel) for name, wheel in distributions.items()}
        self._write("start", device=device, **versions)

    def step(self, *, loss: float | None, grad_norm: float | None, **figures: Any) -> None:
        """Write the event of one training step: `step` (its number), `skipped`, `passes`, `seconds`, and what else."""
        self._write("step", **_number("loss", loss), **_number("grad_norm", grad_norm), **figures)

    def result(self, *, digests: Mapping[str, str], **figures: Any) -> None:
        """Write the last event: the final state and the figures of the run, in bytes and seconds; None: not measured.

        Every arm has `engine`, `state_bytes`, `released_bytes`, `pinned_bytes` and `peak_allocated_bytes`.
        """
        self._write("result", digests=dict(digests), **figures)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, event: str, **fields: Any) -> None:
        self._file.write(json.dumps({"event": event, **fields}, allow_nan=False) + "\n")


def _number(name: str, value: float | None) -> dict[str, float | str | None]:
    finite = value is not None and math.isfinite(value)
    return {name: value if finite else None, f"{name}_hex": None if value is None else float(value).hex()}


def digest(tensors: Mapping[str, torch.Tensor] | Iterable[torch.Tensor]) -> str:
    """Return a sha256 (hex) that tells the raw bytes of tensors, or of a mapping's values, apart, in their order."""
    return joined(digest_each(tensors.values() if isinstance(tensors, Mapping) else tensors))


def digest_each(tensors: Iterable[torch.Tensor]) -> list[bytes]:
    """Return the sha256 of each tensor's bytes, computed by several threads: 20 GB would take one some 15 s."""
    with ThreadPoolExecutor(DIGEST_THREADS) as pool:
        return list(pool.map(_digest_of_one, tensors))


def joined(digests: Iterable[bytes]) -> str:
    """Return the sha256 (hex) of what `digest_each` returned."""
    return hashlib.sha256(b"".join(digests)).hexdigest()


def _digest_of_one(tensor: torch.Tensor) -> bytes:
    import torch

    flat = tensor.detach().contiguous().view(-1)
    # As bytes, because numpy has no bfloat16.
    return hashlib.sha256(flat.view(torch.uint8).cpu().numpy().data).digest()
