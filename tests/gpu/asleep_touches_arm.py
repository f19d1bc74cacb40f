"""Uses of what a `Residency` has sent off the GPU: each is refused by name, and training goes on bitwise.

    python tests/gpu/asleep_touches_arm.py

Prints one JSON object. Without a GPU the model is a tiny one, on the CPU.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from phases_arm import Trainer, parse

sys.path.append(str(Path(__file__).parents[1] / "sleep"))


def run(sleeps: bool) -> dict[str, Any]:
    """Trains four steps, with a sleep and every use in it after the first and the second."""
    import bridge_fgo

    trainer = Trainer(parse(["--layers", "4"]))
    result: dict[str, Any] = {"refused": {}, "others": {}, "losses": [trainer.step(0)]}
    if not sleeps:
        return {**result, "losses": [*result["losses"], *(trainer.step(i) for i in (1, 2))], "sums": trainer.sums()}
    from test_touches_while_asleep import USES, Awake

    training = SimpleNamespace(model=[trainer.ddp], optimizer=trainer.optimizer, step=lambda: trainer.step(9))
    residency = bridge_fgo.Residency(trainer.ddp, trainer.optimizer)
    held = Awake(training, Path(tempfile.mkdtemp()))
    for i in (1, 2):
        residency.offload()
        for kind, uses in USES.items():
            for name, use in uses.items():
                try:
                    trainer.step(9) if name == "forward" else use(held)
                    result["others"][name] = "not refused"
                except RuntimeError as error:
                    named = "reload('" in str(error) and (name == "forward" or f"('{kind}')" in str(error))
                    place = result["refused" if named else "others"]
                    place[name] = str(error)[:200]
        residency.reload()
        result["losses"].append(trainer.step(i))
    return {**result, "sums": trainer.sums()}


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1:] != ["never"])))
