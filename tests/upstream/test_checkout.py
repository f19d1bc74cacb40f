"""Both engines on a Megatron-LM checkout whose mcore has an offloader of its own.

Runs where BRIDGE_FGO_MEGATRON_LM names one (generation 1 and 2 are in Megatron-LM's `dev` branch only).
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = os.environ.get("BRIDGE_FGO_MEGATRON_LM")
TESTS = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(not CHECKOUT, reason="BRIDGE_FGO_MEGATRON_LM names no Megatron-LM checkout")


def run_arm(tmp_path, offload, *options):
    events = tmp_path / f"{offload}.jsonl"
    arm = [sys.executable, str(TESTS / "cpu_arm.py"), "--steps", "6", "--offload", offload]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(CHECKOUT), str(TESTS.parent)])}
    subprocess.run([*arm, "--events", str(events), *options], check=True, env=environment, timeout=300)
    return [json.loads(line) for line in events.read_text().splitlines()]


def test_native_is_bitwise_equal_to_resident(tmp_path):
    resident, offloaded = run_arm(tmp_path, "off"), run_arm(tmp_path, "on", "--engine", "native")
    assert offloaded[-1]["engine"] == "native"
    assert offloaded[-1]["released_bytes"] > 0
    assert offloaded[-1]["digests"] == resident[-1]["digests"]
    assert [e["loss_hex"] for e in resident[1:-1]] == [e["loss_hex"] for e in offloaded[1:-1]]


OFFLOADER = "megatron/core/optimizer/cpu_offloading/optimizer_state_offloader.py"
CONFIG = "megatron/core/optimizer/optimizer_config.py"


@pytest.mark.parametrize("chunk_numel", [0, 20_000])
def test_mcores_own_offloader_of_generation_1_is_bitwise_equal_to_resident_with_reruns_and_skips(tmp_path, chunk_numel):
    here = Path(CHECKOUT or "")
    if not (here / OFFLOADER).exists():
        pytest.skip("this mcore has no offloader of generation 1")
    if chunk_numel and "offload_optimizer_states_chunk_numel" not in (here / CONFIG).read_text():
        pytest.skip("this mcore does not step in chunks")
    path = os.pathsep.join([str(CHECKOUT), str(TESTS.parent), str(TESTS)])
    child = [sys.executable, Path(__file__).with_name("fused_child.py"), str(chunk_numel)]

    def train(name, *options):
        events = tmp_path / name
        trouble = ["--steps", "6", "--rerun-steps", "3", "--grad-norm-skip-steps", "4"]
        command = [*child, *trouble, *options, "--events", str(events)]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": path}, timeout=300)
        return [json.loads(line) for line in events.read_text().splitlines()]

    resident, offloaded = train("off", "--offload", "off"), train("on", "--offload", "on", "--engine", "mcore")
    assert offloaded[-1]["engine"] == "mcore generation 1" + (" in chunks" if chunk_numel else "")
    assert offloaded[-1]["peak_forward_backward_bytes"] == 0 < resident[-1]["peak_forward_backward_bytes"]
    assert offloaded[-1]["digests"] == resident[-1]["digests"]
    assert [e["loss_hex"] for e in resident[1:-1]] == [e["loss_hex"] for e in offloaded[1:-1]]
