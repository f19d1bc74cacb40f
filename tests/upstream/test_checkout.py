"""Both engines train bitwise on a Megatron-LM that has an offloader of its own.

Runs where BRIDGE_FGO_MEGATRON_LM names one (generation 1 and 2 are in Megatron-LM's `dev` branch only).
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

RAN_ON = "CPU"

CHECKOUT = os.environ.get("BRIDGE_FGO_MEGATRON_LM")
TESTS = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(not CHECKOUT, reason="BRIDGE_FGO_MEGATRON_LM names no Megatron-LM checkout")


def trained(*arguments):
    """Train on the checkout; return what `checkout_child` prints."""
    path = os.pathsep.join([str(CHECKOUT), str(TESTS.parent), str(TESTS)])
    command = [sys.executable, Path(__file__).with_name("checkout_child.py"), *arguments]
    how = {"env": {**os.environ, "PYTHONPATH": path}, "stdout": subprocess.PIPE, "text": True, "timeout": 300}
    return json.loads(subprocess.run(command, check=True, **how).stdout.splitlines()[-1])


def test_native_is_bitwise_equal_to_resident():
    resident, offloaded = trained("resident"), trained("native")
    assert offloaded["engine"] == "native" and offloaded["held"] == 0 < resident["held"]
    assert offloaded["same"] == resident["same"]


OFFLOADER = "megatron/core/optimizer/cpu_offloading/optimizer_state_offloader.py"


def test_mcores_own_offloader_of_generation_1_is_bitwise_equal_to_resident_with_reruns_and_skips():
    if not (Path(CHECKOUT or "") / OFFLOADER).exists():
        pytest.skip("this mcore has no offloader of generation 1")
    resident, offloaded = (trained(engine, "fused") for engine in ("resident", "mcore"))
    assert offloaded["engine"] == "mcore generation 1"
    assert offloaded["held"] == 0 < resident["held"]
    assert offloaded["same"] == resident["same"]
