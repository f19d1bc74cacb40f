"""The link probe: pinned copies between host and GPU, each way alone and both ways at once.

    python -m bridge_fgo.tools.link

Prints one JSON object, in bytes a second. Under torchrun every rank copies at the same time, and rank 0 prints
what the slowest got, which is what a step of all ranks gets.
"""

import json
import os
import subprocess
import sys
import time

COPY_BYTES = 2**31
COPIES = 4


def launcher(ranks: int) -> tuple[str, ...]:
    """Return the arguments between `python` and `-m` that start one process for each rank."""
    return () if ranks == 1 else ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))


def probe(gpus: int) -> dict[str, float]:
    """Return what `measure` returns if all GPUs copy at once, each in a process of its own.

    Raises:
        ChildProcessError: the processes failed; the error's note is the end of their log.
    """
    command = [sys.executable, *launcher(gpus), "-m", __name__]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0 or not lines:
        error = ChildProcessError(f"the link probe failed: exit status {done.returncode}")
        error.add_note(done.stderr[-3000:])
        raise error
    return json.loads(lines[-1])


def measure() -> dict[str, float]:
    """Return `d2h`, `h2d` and `duplex` (each way, both ways busy) of the current device."""
    import torch

    host = [torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    gpu = [torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def seconds(out: bool, back: bool) -> float:
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(COPIES):
            if out:
                with torch.cuda.stream(streams[0]):
                    host[0].copy_(gpu[0], non_blocking=True)
            if back:
                with torch.cuda.stream(streams[1]):
                    gpu[1].copy_(host[1], non_blocking=True)
        torch.cuda.synchronize()
        took = torch.tensor(time.perf_counter() - start, device="cuda")
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(took, op=torch.distributed.ReduceOp.MAX)
        return float(took)

    seconds(True, True)  # warms up
    total = COPY_BYTES * COPIES
    return {
        "d2h": total / seconds(True, False),
        "h2d": total / seconds(False, True),
        "duplex": total / seconds(True, True),
    }


def main() -> None:
    """Measure and print."""
    import torch

    rank = int(os.environ.get("LOCAL_RANK", "0"))
    torch.cuda.set_device(rank)
    if "RANK" in os.environ:
        torch.distributed.init_process_group("nccl", device_id=torch.device("cuda", rank))
    result = measure()
    if rank == 0:
        print(json.dumps(result), flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
