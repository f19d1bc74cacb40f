"""One training arm on the CPU: that of `bridge_fgo.tools.arms.gpu`, of a smaller GPT of plain torch.

    python -m bridge_fgo.tools.arms.cpu --steps 20 --offload on --events events.jsonl

Transformer Engine and CUDA stand in (`bridge_fgo.tools.standins`): it shows whether two arms are bitwise equal and how
many bytes go, not how fast. Without an allocator to ask, peaks are the largest samples of live optimizer state: as a
microbatch's forward begins, and after a step; `peak_allocated_bytes` is the larger one, `peak_reserved_bytes` 0.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

SIZE = ("--layers", "2", "--hidden", "128", "--heads", "4", "--vocab", "256", "--seq", "32", "--gbs", "4")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one arm. What goes wrong ends the process with a traceback and a status other than 0."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks: nothing may take a GPU that is there
    from bridge_fgo.tools.standins.cuda import install_standins

    install_standins()
    from bridge_fgo.tools.arms import gpu

    gpu.train(gpu.parse([*SIZE, *(sys.argv[1:] if arguments is None else arguments)]), on_cpu=True)


if __name__ == "__main__":
    main()
