"""One training arm on GPUs: a small GPT through Bridge's own `pretrain()`, on mock data.

    python -m bridge_fgo.harness.gpu --steps 50 --offload on --events events.jsonl
    torchrun --nproc-per-node 2 -m bridge_fgo.harness.gpu --tp 2 ...

Rank 0 writes the events that `bridge_fgo.cli.demo` and the tests read. Digests cover
every rank; bytes and times are rank 0's. Two runs with the same options are bitwise
equal, so that whatever differs between two arms comes from what sets them apart.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge_fgo.harness.collector_clock import CollectorClock
from bridge_fgo.harness.final_state import final_state, joined_digests, of_ranks
from bridge_fgo.harness.gpu_config import build_config
from bridge_fgo.harness.moves_alone import MovesAlone
from bridge_fgo.harness.phase_clock import PhaseClock
from bridge_fgo.harness.record import EventWriter
from bridge_fgo.harness.step_trace import StepTrace
from bridge_fgo.options import add_offload_options, offload_config

if TYPE_CHECKING:
    from megatron.bridge.training.callbacks import Callback

    from bridge_fgo.figures import Stats

# From the 4th step on moments exist and buffers are warm: peaks are those of all steps that come.
FIRST_MEASURED_STEP = 4


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the options; a combination that makes no sense ends the process with status 2."""
    parser = argparse.ArgumentParser(
        prog="python -m bridge_fgo.harness.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    size = parser.add_argument_group("size")
    size.add_argument("--layers", type=int, default=8)
    size.add_argument("--hidden", type=int, default=2048)
    size.add_argument("--ffn", type=int, help="default: 4 times hidden")
    size.add_argument("--heads", type=int, default=16)
    size.add_argument("--vocab", type=int, default=32000)
    size.add_argument("--seq", type=int, default=1024)
    size.add_argument("--mbs", type=int, default=2, help="sequences of a microbatch")
    size.add_argument("--gbs", type=int, default=8, help="sequences of a step, over all ranks")
    size.add_argument("--experts", type=int, help="of a mixture of experts in every layer; default: none")
    size.add_argument("--topk", type=int, default=2, help="experts a token")
    size.add_argument("--steps", type=int, default=20)
    spread = parser.add_argument_group("parallelism")
    spread.add_argument("--tp", type=int, default=1)
    spread.add_argument("--pp", type=int, default=1)
    spread.add_argument("--vpp", type=int, help="model chunks of a pipeline stage; default: one, not interleaved")
    spread.add_argument("--cp", type=int, default=1)
    spread.add_argument("--ep", type=int, default=1)
    spread.add_argument("--instances", type=int, default=1, help="distributed optimizer instances")
    spread.add_argument(
        "--dp-overlap",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="overlap gradient reduction and parameter gathering with computation",
    )
    optimizer = parser.add_argument_group("optimizer")
    optimizer.add_argument("--precision-aware", action="store_true")
    optimizer.add_argument("--moments-dtype", choices=("fp32", "bf16"), default="fp32")
    optimizer.add_argument("--hybrid", action="store_true", help="the peer arm: Adam on the CPU")
    parser.add_argument(
        "--deterministic",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="Bridge's deterministic mode; without it two resident runs may differ already",
    )
    offload = parser.add_argument_group("offload")
    offload.add_argument("--offload", choices=("on", "off"), default="off")
    offload.add_argument("--no-install", action="store_true", help="set the flag, leave this package out")
    add_offload_options(offload)
    checkpoint = parser.add_argument_group("checkpoints")
    checkpoint.add_argument("--save", type=Path, help="folder to save into every --save-interval steps, and at the end")
    checkpoint.add_argument("--save-interval", type=int, default=4)
    checkpoint.add_argument("--async-save", action="store_true", help="by mcore's persistent worker")
    checkpoint.add_argument("--fully-reshardable", action="store_true", help="default: dp_reshardable")
    checkpoint.add_argument("--load", type=Path, help="folder to resume from")
    checkpoint.add_argument("--load-step", type=int, help="default: the newest")
    checkpoint.add_argument("--load-optim", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--recompute-attention", action="store_true", help="recompute attention scores in backward")
    parser.add_argument("--te-graphs", action="store_true", help="capture the MLP of each layer into CUDA graphs")
    parser.add_argument(
        "--alone-steps", type=int, default=0, help="so many steps more, for the host's work for copies by itself"
    )
    parser.add_argument("--trace", type=Path, help="profile two steps more, not among the figures, into this file")
    parser.add_argument("--events", type=Path, required=True, help="file to append JSON events to")
    options = parser.parse_args(arguments)
    if options.ffn is None:
        options.ffn = 4 * options.hidden
    if options.moments_dtype != "fp32" and not options.precision_aware:
        parser.error("--moments-dtype bf16 needs --precision-aware")
    if options.hybrid and options.offload == "on":
        parser.error("--hybrid keeps the states on the CPU for good: it does not go with --offload on")
    return options


def enqueue_seconds(stats: Stats | None) -> float:
    """Return the host's seconds for the moves of the newest step; 0 without offload."""
    return 0.0 if stats is None else stats.enqueue_seconds


def make_recorder(options: argparse.Namespace, clock: PhaseClock) -> Callback:
    """Return the callback that measures the run and, on rank 0, writes its events."""
    import torch
    from megatron.bridge.training.callbacks import Callback

    import bridge_fgo

    class Recorder(Callback):
        def __init__(self) -> None:
            self.writer: EventWriter | None = None
            self.step = 0
            self.started = 0.0
            self.seconds: list[float] = []
            self.collector = CollectorClock()
            self.collector_seconds: list[float] = []
            self.newest: dict[str, Any] = {}
            self.peaks: dict[str, Any] = {}
            self.first_step_peak: int | None = None
            self.base = 0
            self.enqueue: list[float] = []
            self.enqueue_alone: list[float] = []
            self.alone: MovesAlone | None = None
            self.trace: StepTrace | None = None

        def on_train_start(self, context: Any) -> None:
            if torch.distributed.get_rank() == 0:
                self.writer = EventWriter(options.events)
                self.writer.start(torch.cuda.get_device_name())

        def on_train_step_start(self, context: Any) -> None:
            # A step lasts until the next one begins. Only the compute stream is waited for: copies may go on
            # from one step into the next, as they do in training.
            torch.cuda.current_stream().synchronize()
            self.end_step(time.perf_counter())
            self.step += 1
            if self.step == options.steps + 1 and options.alone_steps:
                self.alone = MovesAlone(torch.cuda.current_stream())
            if self.step == options.steps + options.alone_steps + 1:
                self.end_alone()
                self.trace = StepTrace()
            if self.trace is not None:
                self.trace.begin_step()
            elif self.step == min(FIRST_MEASURED_STEP, options.steps):
                torch.cuda.reset_peak_memory_stats()
                self.base = torch.cuda.memory_allocated()
            self.collector.take()  # what came before the first step is of none
            self.started = time.perf_counter()

        def on_train_step_end(self, context: Any) -> None:
            if self.trace is not None:
                self.trace.end_step()
                return
            if self.alone is not None:
                self.enqueue_alone.append(enqueue_seconds(bridge_fgo.stats()))
                return
            self.sample_peaks()
            loss = (context.loss_dict or {}).get("lm loss")
            loss = None if loss is None else float(loss)
            if options.pp > 1:  # only the last pipeline stage has it, and rank 0 is in the first
                loss = next((value for value in of_ranks(loss) if value is not None), None)
            self.newest = dict(
                step=self.step,
                loss=loss,
                grad_norm=None if context.grad_norm is None else float(context.grad_norm),
                skipped=bool(context.skipped_iter),
                passes=1,  # the rerun machine is off here: one forward and backward pass
            )

        def end_alone(self) -> None:
            """Make moves as in training again."""
            if self.alone is not None:
                self.alone.end()
                self.alone = None

        def end_step(self, now: float) -> None:
            """Write the event of the step that ended at `now`, if it is among those that are measured."""
            if not self.newest:
                return
            self.seconds.append(now - self.started)
            self.collector_seconds.append(self.collector.take())
            if self.writer is not None:
                self.writer.step(**self.newest, seconds=self.seconds[-1])
            self.newest = {}

        def sample_peaks(self) -> None:
            """Take the newest step's peaks into account.

            The package resets the allocator's peaks between the phases of a step, to tell
            them apart. So its own figures, where it is at work, complete the allocator's.
            """
            stats = bridge_fgo.stats()
            if self.step == 1 and stats is not None:
                self.first_step_peak = stats.peak_step_bytes
            if self.step < min(FIRST_MEASURED_STEP, options.steps):
                return
            forward_backward = 0 if stats is None else stats.peak_forward_backward_bytes or 0
            step = 0 if stats is None else stats.peak_step_bytes or 0
            reserved = 0 if stats is None else stats.peak_reserved_bytes or 0
            self.enqueue.append(enqueue_seconds(stats))
            newest = {
                "allocated": max(torch.cuda.max_memory_allocated(), forward_backward, step),
                "reserved": max(torch.cuda.max_memory_reserved(), reserved),
                "forward_backward": forward_backward,
                "step": step,
            }
            self.peaks = {name: max(self.peaks.get(name, 0), value) for name, value in newest.items()}

        def on_train_end(self, context: Any) -> None:
            torch.cuda.synchronize()
            self.end_step(time.perf_counter())
            self.collector.end()
            self.end_alone()
            if self.trace is not None:
                self.trace.end(options.trace if self.writer is not None else None)
            bridge_fgo.reload_states()
            state = final_state(context.model, context.optimizer)
            digests = joined_digests(state)
            phases = of_ranks(clock.medians())
            if self.writer is None:
                return
            stats = bridge_fgo.stats()
            if stats is None:  # nobody told the phases of a step apart
                self.peaks.update(forward_backward=None, step=None)
            tensors = [tensor for part in ("masters", "moments") for tensor in state[part].values()]
            self.writer.result(
                digests=digests,
                engine="hybrid" if options.hybrid else None if stats is None else stats.engine,
                state_bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors),
                released_bytes=0 if stats is None else stats.released_bytes,
                copied_bytes=0 if stats is None else stats.bytes_offloaded,
                pinned_bytes=0 if stats is None else stats.pinned_bytes,
                step_seconds=self.seconds,
                collector_seconds=self.collector_seconds,
                base_bytes=self.base,
                first_step_peak_bytes=self.first_step_peak,
                pin_seconds=0.0 if stats is None else stats.pin_seconds,
                enqueue_seconds=self.enqueue,
                enqueue_alone_seconds=self.enqueue_alone,
                phase_seconds=phases[0],
                phase_seconds_of_ranks=phases,
                **{f"peak_{name}_bytes": value for name, value in self.peaks.items()},
            )

    return Recorder()


def use_one_rank_by_default() -> None:
    """Let the arm run without torchrun: sets what Bridge's initialization reads, where unset."""
    if "RANK" in os.environ:
        return
    # Port 0: the store takes one that is free. One that was free a moment ago may be taken by now.
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")


def be_deterministic() -> None:
    """Set what Bridge's deterministic mode asks of the environment, where unset.

    Seen on an H200 without it: a 24-layer GPT ended in one of two results, resident or not, depending on
    nothing but timing.
    """
    import torch

    os.environ.setdefault("NCCL_ALGO", "Ring")
    os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Filling new memory only shows reads of what nobody wrote, and takes time in every arm.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]


def skip_building_what_is_built() -> None:
    """Keep Bridge from building mcore's dataset helpers where the wheel has them built.

    Bridge runs `make` in `megatron/core/datasets` at every start. The published wheel
    holds the built extension but no Makefile, so that `pretrain()` would end the process.
    """
    from megatron.bridge.training import initialize
    from megatron.core import datasets

    folder = Path(datasets.__path__[0])
    built = importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None
    if built and not (folder / "Makefile").exists():
        initialize.compile_helpers = lambda: None


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one arm. What goes wrong ends the process with a traceback and a status other than 0."""
    options = parse(arguments)
    use_one_rank_by_default()
    if options.deterministic:
        be_deterministic()
    import bridge_fgo

    if options.offload == "on" and not options.no_install:
        bridge_fgo.install(offload_config(options))
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    skip_building_what_is_built()
    clock = PhaseClock(options.steps)
    pretrain(build_config(options), clock.timed(forward_step), callbacks=[make_recorder(options, clock)])


if __name__ == "__main__":
    main()
