"""What a GPU did in one training step: kernels and copies on its clock, and memory."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

COPIES = {"Memcpy DtoH": "d2h", "Memcpy HtoD": "h2d"}
STEP = "bridge_fgo step"
MEMORY_ENTRIES = 2_000_000


class StepTrace:
    """Profiles two steps by PyTorch's profiler and memory history, and keeps the second.

    Starting the profiler waits for all copies, so the first step has none from the step before it.
    """

    def __init__(self) -> None:
        self._profiler: Any = None
        self._annotation: Any = None
        self._allocated = 0

    def begin_step(self) -> None:
        """Begin a step: the first starts the profiler, the second is the one to keep."""
        import torch

        if self._profiler is None:
            torch.cuda.synchronize()
            activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
            self._profiler = torch.profiler.profile(activities=activities)
            self._profiler.start()
            return
        torch.cuda.memory._record_memory_history(max_entries=MEMORY_ENTRIES, stacks="python", context=None)
        self._allocated = torch.cuda.memory_allocated()
        self._annotation = torch.profiler.record_function(STEP)
        self._annotation.__enter__()

    def end_step(self) -> None:
        """End a step, once the compute stream has run dry; copies may go on."""
        import torch

        if self._annotation is not None:
            torch.cuda.current_stream().synchronize()
            self._annotation.__exit__(None, None, None)

    def end(self, path: Path | None) -> None:
        """Write what happened in the step that was kept as gzipped JSON; times in seconds from its begin.

        step: (begin, end); gpu: (kind, start, duration, bytes) with kind "kernel", "d2h" or "h2d"; memory: (time,
        allocated bytes). A `path` of None only stops the profiler.
        """
        import torch

        torch.cuda.synchronize()
        self._profiler.stop()
        snapshot = torch.cuda.memory._snapshot()
        torch.cuda.memory._record_memory_history(enabled=None)
        if path is None:
            return
        raw = path.with_suffix(".chrome.json")
        self._profiler.export_chrome_trace(str(raw))
        events = json.loads(raw.read_text())["traceEvents"]
        raw.unlink()
        step = next(e for e in events if e.get("name") == STEP and e.get("cat") == "user_annotation")
        zero = step["ts"]
        device_traces: Any = snapshot.get("device_traces", [])
        trace = {
            "step": (0.0, step["dur"] / 1e6),
            "gpu": sorted(event for event in _gpu_events(events, zero) if event[1] + event[2] > 0),
            "memory": _memory(device_traces[torch.cuda.current_device()], self._allocated),
        }
        with gzip.open(path, "wt") as file:
            json.dump(trace, file)


def _gpu_events(events: Sequence[dict[str, Any]], zero: float) -> Iterator[tuple[str, float, float, int]]:
    """Yield (kind, start, duration, bytes) of what the GPU did; copies on the GPU, and memsets, are kernels."""
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in ("kernel", "gpu_memset", "gpu_memcpy"):
            kind = next((kind for name, kind in COPIES.items() if event["name"].startswith(name)), "kernel")
            yield kind, (event["ts"] - zero) / 1e6, event["dur"] / 1e6, int(event.get("args", {}).get("bytes", 0))


def _memory(trace: Sequence[Any], allocated: int) -> list[tuple[float, int]]:
    points: list[tuple[float, int]] = []
    start = trace[0]["time_us"] if trace else 0
    for entry in trace:
        # A block is given back when its free is requested; with a use on another stream it is completed later.
        change = {"alloc": entry["size"], "free_requested": -entry["size"]}.get(entry["action"])
        if change is not None:
            allocated += change
            points.append(((entry["time_us"] - start) / 1e6, allocated))
    return points
