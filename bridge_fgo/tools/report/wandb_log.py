"""Reads what W&B keeps of a run on disk: `wandb/run-*/run-ID.wandb`, of runs that were synced and of offline ones.

The file is a LevelDB log (google/leveldb, doc/log_format.md) behind a header of 7 bytes, and each entry a protobuf
`Record` (wandb/proto/wandb_internal.proto). Read here, because the reader that was in the package is no more in wandb
0.31. Tested with files of 0.19.11 and 0.31.0.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

MAGIC = b":W&B"
HEADER = 7
"""Bytes of the file's header, and of each record's: a checksum of 4, a length of 2, a type of 1."""
BLOCK = 2**15
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4
"""Types of a record: a whole entry, or a part of one."""

# Numbers of the fields in wandb_internal.proto.
HISTORY, ITEM, STEP = 2, 1, 2
KEY, NESTED_KEY, INTEGER, NUMBER, VALUE_JSON = 1, 2, 5, 6, 16

Fields = list[tuple[int, int | bytes]]


def read_history(file: Path) -> dict[str, dict[int, float]]:
    """Return the numbers that a run logged, by tag and step; of a run that goes on, up to where the file is cut off.

    Raises:
        ValueError: this is no such file, or holds no history.
    """
    data = file.read_bytes()
    if not data.startswith(MAGIC):
        raise ValueError(f"{file}: is not what W&B writes (run-ID.wandb)")
    found: dict[str, dict[int, float]] = {}
    for entry in _entries(data):
        for number, value in _fields(entry):
            if number == HISTORY and isinstance(value, bytes):
                step, row = _row(value)
                for tag, figure in row.items():
                    found.setdefault(tag, {})[step] = figure
    if not found:
        raise ValueError(f"{file}: no history in it; W&B writes it as the run logs its first step")
    return found


def _entries(data: bytes) -> Iterator[bytes]:
    """Yield the entries of a LevelDB log."""
    place, parts = HEADER, b""
    while place + HEADER <= len(data):
        left = BLOCK - place % BLOCK
        if left < HEADER:  # too little for a header: padding
            place += left
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        part = data[place + HEADER : place + HEADER + length]
        if len(part) < length or kind not in (FULL, FIRST, MIDDLE, LAST):
            return
        parts = part if kind in (FULL, FIRST) else parts + part
        if kind in (FULL, LAST):
            yield parts
        place += HEADER + length


def _row(history: bytes) -> tuple[int, dict[str, float]]:
    """Return the step of a `HistoryRecord`, and its numbers by tag."""
    step, row = 0, {}
    for number, value in _fields(history):
        if number == STEP and isinstance(value, bytes):
            step = next((int(count) for _, count in _fields(value) if isinstance(count, int)), 0)
        elif number == ITEM and isinstance(value, bytes):
            tag, figure = _item(value)
            if figure is not None and not tag.startswith("_"):  # W&B's own: _step, _runtime, _timestamp
                row[tag] = figure
    return step, row


def _item(item: bytes) -> tuple[str, float | None]:
    """Return the tag of a `HistoryItem`, and its value where that is a number."""
    tag, figure = "", None
    for number, value in _fields(item):
        if number in (KEY, NESTED_KEY) and isinstance(value, bytes):
            tag = ".".join(filter(None, (tag, value.decode())))
        elif number == VALUE_JSON and isinstance(value, bytes):
            parsed = json.loads(value)
            figure = float(parsed) if isinstance(parsed, int | float) and not isinstance(parsed, bool) else None
        elif number == INTEGER and isinstance(value, int):
            figure = float((value >> 1) ^ -(value & 1))  # a signed integer, as protobuf zigzags it
        elif number == NUMBER and isinstance(value, bytes):
            figure = struct.unpack("<d", value)[0]
    return tag, figure


def _fields(message: bytes) -> Fields:
    """Return the fields of a protobuf message: numbers of varints, bytes of all others."""
    found: Fields = []
    place = 0
    while place < len(message):
        key, place = _varint(message, place)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, place = _varint(message, place)
        else:
            length = {1: 8, 5: 4}.get(wire)
            if length is None:
                length, place = _varint(message, place)
            value, place = message[place : place + length], place + length
        found.append((number, value))
    return found


def _varint(message: bytes, place: int) -> tuple[int, int]:
    """Return a number of seven bits a byte, and the place after it."""
    value = shift = 0
    while True:
        byte = message[place]
        value |= (byte & 127) << shift
        place, shift = place + 1, shift + 7
        if byte < 128:
            return value, place
