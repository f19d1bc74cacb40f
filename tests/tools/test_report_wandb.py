"""The report reads W&B's own files."""

from __future__ import annotations

import base64
import struct
from pathlib import Path

import pytest

from bridge_fgo.tools.report import runs
from bridge_fgo.tools.report.wandb_log import BLOCK, FIRST, FULL, HEADER, LAST, MIDDLE, read_history

# The first two history records of offline runs, as W&B wrote them: base64, by its version.
RECORDS = {
    "0.31.0": [
        (
            "CAgS7QEKFhIOaXRlcmF0aW9uLXRpbWWCAQMwLjUKJBIKX3RpbWVzdGFtcIIBFTEuNzk1NDc4MzcyMzI5MDE3ZSswOQoiEhli"
            "cmlkZ2VfZmdvL3JlbGVhc2VkX2J5dGVzggEEMTAwMAokEhpicmlkZ2VfZmdvL3BlYWtfc3RlcF9ieXRlc4IBBTdlKzA5ChgS"
            "CF9ydW50aW1lggELMC4zMDI5MTQ2OTgKDRIHbG0gbG9zc4IBATEKDxIJZ3JhZC1ub3JtggEBMgoYEhJsbSBsb3NzIHZzIHNh"
            "bXBsZXOCAQExCgsSBV9zdGVwggEBMRICCAE="
        ),
        (
            "CAsS8AEKDxIJZ3JhZC1ub3JtggEBNAoWEg5pdGVyYXRpb24tdGltZYIBAzAuNQolEgpfdGltZXN0YW1wggEWMS43OTU0Nzgz"
            "NzIzMjk2ODc0ZSswOQoYEghfcnVudGltZYIBCzAuMzAzNTg0NjE0CgsSBV9zdGVwggEBMgoPEgdsbSBsb3NzggEDMC41CiIS"
            "GWJyaWRnZV9mZ28vcmVsZWFzZWRfYnl0ZXOCAQQyMDAwCiQSGmJyaWRnZV9mZ28vcGVha19zdGVwX2J5dGVzggEFN2UrMDkK"
            "GBISbG0gbG9zcyB2cyBzYW1wbGVzggEBMRICCAI="
        ),
    ],
    "0.19.11": [
        (
            "CAgS7gEKFhIOaXRlcmF0aW9uLXRpbWWCAQMwLjUKJRIKX3RpbWVzdGFtcIIBFjEuNzk1NDc4NDA5MzQ2Mjc3N2UrMDkKIhIZ"
            "YnJpZGdlX2Znby9yZWxlYXNlZF9ieXRlc4IBBDEwMDAKJBIaYnJpZGdlX2Znby9wZWFrX3N0ZXBfYnl0ZXOCAQU3ZSswOQoL"
            "EgVfc3RlcIIBATEKDRIHbG0gbG9zc4IBATEKDxIJZ3JhZC1ub3JtggEBMgoYEhJsbSBsb3NzIHZzIHNhbXBsZXOCAQExChgS"
            "CF9ydW50aW1lggELMC4xNDcwOTE3ODcSAggB"
        ),
        (
            "CAsS7gEKIxIKX3RpbWVzdGFtcIIBFDEuNzk1NDc4NDA5MzQ2NTZlKzA5CiISGWJyaWRnZV9mZ28vcmVsZWFzZWRfYnl0ZXOC"
            "AQQyMDAwChgSCF9ydW50aW1lggELMC4xNDc0NjI3OTUKDxIJZ3JhZC1ub3JtggEBNAokEhpicmlkZ2VfZmdvL3BlYWtfc3Rl"
            "cF9ieXRlc4IBBTdlKzA5ChgSEmxtIGxvc3MgdnMgc2FtcGxlc4IBATEKCxIFX3N0ZXCCAQEyCg8SB2xtIGxvc3OCAQMwLjUK"
            "FhIOaXRlcmF0aW9uLXRpbWWCAQMwLjUSAggC"
        ),
    ],
}
LOGGED = {
    "lm loss": {1: 1.0, 2: 0.5},
    "grad-norm": {1: 2.0, 2: 4.0},
    "iteration-time": {1: 0.5, 2: 0.5},
    "bridge_fgo/released_bytes": {1: 1000.0, 2: 2000.0},
    "bridge_fgo/peak_step_bytes": {1: 7e9, 2: 7e9},
}


def entries(version: str) -> list[bytes]:
    return [base64.b64decode(record) for record in RECORDS[version]]


def write(path: Path, found: list[bytes], before: int = 0) -> Path:
    """Write entries as LevelDB's log has them, divided where a block ends; before: bytes of an entry to come first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = b":W&B\0\0\0"
    for entry in ([bytes([0x7A, *_varint(before - 8), *bytes(before - 8)])] if before else []) + found:
        rest, is_first = entry, True
        while rest or is_first:
            left = BLOCK - len(data) % BLOCK
            if left < HEADER:
                data += bytes(left)
                continue
            part, rest = rest[: left - HEADER], rest[left - HEADER :]
            kind = (LAST if not rest else MIDDLE) if not is_first else (FULL if not rest else FIRST)
            data += bytes(4) + struct.pack("<HB", len(part), kind) + part
            is_first = False
    path.write_bytes(data)
    return path


def _varint(value: int) -> bytes:
    found = b""
    while value >= 128:
        found += bytes([value & 127 | 128])
        value >>= 7
    return found + bytes([value])


@pytest.mark.parametrize("version", RECORDS)
def test_a_run_is_read_by_its_folder_and_by_its_file(tmp_path, version):
    file = write(tmp_path / "wandb" / "run-1" / "run-abc.wandb", entries(version))
    for path in (file, file.parent, tmp_path):
        (run,) = runs.load(path)
        assert run.scalars == LOGGED  # without W&B's own tags and Bridge's scalars over samples
        assert run.totals == {"released_bytes": 2000.0, "peak_step_bytes": 7e9} and not run.is_fp32
    assert runs.load(file)[0].name == "run-1"


@pytest.mark.parametrize("before", [BLOCK - 250, BLOCK - HEADER - 7 - 3, 3 * BLOCK])
def test_an_entry_that_lies_in_two_blocks_is_whole(tmp_path, before):
    file = write(tmp_path / "run-abc.wandb", entries("0.31.0"), before)
    assert {tag: read_history(file)[tag] for tag in LOGGED} == LOGGED


def test_a_run_that_goes_on_is_read_as_far_as_it_is_written(tmp_path):
    file = write(tmp_path / "run-abc.wandb", entries("0.31.0"))
    file.write_bytes(file.read_bytes()[:-5])
    assert read_history(file)["lm loss"] == {1: 1.0}


def test_what_cannot_be_read_is_told_by_name(tmp_path):
    (tmp_path / "x.wandb").write_bytes(b"something else")
    with pytest.raises(ValueError, match=r"x\.wandb: is not what W&B writes"):
        runs.load(tmp_path / "x.wandb")
    with pytest.raises(ValueError, match="no history in it"):
        runs.load(write(tmp_path / "x.wandb", []))
    write(tmp_path / "two" / "y.wandb", [])
    with pytest.raises(ValueError, match=r"holds 2 runs of W&B: name one of "):
        runs.load(tmp_path)
