"""The native engine on a Megatron-LM checkout whose mcore has an offloader of its own.

Runs where BRIDGE_FGO_MEGATRON_LM names one (generation 1 and 2 are in Megatron-LM's `dev` branch only).
"""

import json
import os
import subprocess
import sys

import pytest

CHECKOUT = os.environ.get("BRIDGE_FGO_MEGATRON_LM")

pytestmark = pytest.mark.skipif(not CHECKOUT, reason="BRIDGE_FGO_MEGATRON_LM names no Megatron-LM checkout")


def run_arm(tmp_path, offload, *options):
    events = tmp_path / f"{offload}.jsonl"
    arm = [sys.executable, "-m", "bridge_fgo.harness.cpu", "--steps", "6", "--offload", offload]
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    subprocess.run([*arm, "--events", str(events), *options], check=True, env=environment, timeout=300)
    return [json.loads(line) for line in events.read_text().splitlines()]


def test_native_is_bitwise_equal_to_resident(tmp_path):
    resident, offloaded = run_arm(tmp_path, "off"), run_arm(tmp_path, "on", "--engine", "native")
    assert offloaded[-1]["engine"] == "native"
    assert offloaded[-1]["released_bytes"] > 0
    assert offloaded[-1]["digests"] == resident[-1]["digests"]
    assert [e["loss_hex"] for e in resident[1:-1]] == [e["loss_hex"] for e in offloaded[1:-1]]
