"""One training arm on the CPU: that of `bridge_fgo.tools.arms.gpu`, of a smaller GPT of plain torch.

    python -m bridge_fgo.tools.arms.cpu --steps 20 --offload on --events events.jsonl

Transformer Engine and CUDA stand in, as `bridge_fgo.tools.standins` says, so this shows whether two
arms are bitwise equal and how many bytes go, not how fast they go.

There is no allocator to ask for peaks. `peak_forward_backward_bytes` and `peak_step_bytes` are bytes of
live optimizer state alone: the largest sample taken as a microbatch's forward begins, and the largest taken
after a step. `peak_allocated_bytes` is the larger of the two; `peak_reserved_bytes` is 0.
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
