"""Figures of each training step: bytes moved, memory peaks by phase, the optimizer's time."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

from bridge_fgo.engines.engine import Engine
from bridge_fgo.engines.gradients import Gradients
from bridge_fgo.memory.meters import PeakMeter, StepClock, Traffic

COUNTERS = ("out", "back", "seconds", "to_file", "from_file", "file_seconds")
"""Counters of a `Traffic`; states have one, and gradients another."""
GRADIENT_FIGURES = ("gradient_bytes", "gradient_bytes_offloaded", "gradient_bytes_reloaded")
"""Fields of `Stats` about gradients."""

FILE_FIGURES = ("file_bytes_written", "file_bytes_read", "file_wait_seconds")


@dataclass(frozen=True)
class Stats:
    """What the offload did in the newest training step of this rank. Sizes are in bytes, times in seconds."""

    engine: str
    """Engine that copies the states: "native", "mcore generation 1" or "mcore generation 2"."""
    mcore: str
    """Version of megatron-core."""
    steps: int = 0
    """Training steps with the offload so far."""
    passes: int = 0
    """Forward-backward passes of the newest step; more than one if the rerun state machine repeated it."""
    state_bytes: int = 0
    """Optimizer state of the rank: moments and master weights, offloaded or not."""
    offloaded_bytes: int = 0
    """Bytes of `state_bytes` to offload; the moments exist only after the first optimizer step."""
    pinned_bytes: int = 0
    """Pinned host memory that the offload holds, for states and for gradients."""
    pin_seconds: float = 0.0
    """Host time for page-locking, before training. 0 if mcore's own offloader pins."""
    released_bytes: int = 0
    """Most state that was off the GPU at the same time in the newest step."""
    bytes_offloaded: int = 0
    """Bytes copied from the GPU to the host (D2H) in the newest step."""
    bytes_reloaded: int = 0
    """Bytes copied from the host to the GPU (H2D) in the newest step."""
    file_bytes_written: int = 0
    """Bytes written to `OffloadConfig.nvme_folder` in the newest step."""
    file_bytes_read: int = 0
    """Bytes read from it in the newest step, some of them ahead for the next."""
    file_wait_seconds: float = 0.0
    """Host time for which training waited for that disk in the newest step."""
    gradient_bytes: int = 0
    """Gradients that take no GPU memory until a backward needs them. 0 with `OffloadConfig.gradients=False`."""
    gradient_bytes_offloaded: int = 0
    """Bytes of gradients copied to the host in the newest step, between microbatches."""
    gradient_bytes_reloaded: int = 0
    """Bytes of gradients copied back to the GPU in the newest step."""
    enqueue_seconds: float = 0.0
    """Host time of the newest step for enqueuing copies and waits and for allocating and freeing GPU memory. 0 if
    mcore's own offloader does it."""
    failed_fetches: int = 0
    """Steps of the run in which GPU memory ran out during a prefetch. The rest of the states was then reloaded just
    before its update, which takes longer."""
    touched_bytes: int = 0
    """State reloaded in the whole run because code used a tensor while it was offloaded. `reload_states()` beforehand
    reloads everything at once."""
    restored_step: int | None = None
    """Finished step that this start went on from after a crash (`OffloadConfig.survive_crash`). None if it did not."""
    restore_seconds: Mapping[str, float] = field(default_factory=dict)
    """Host time of that start by part: to agree on a step, to page-lock its memory, and to go on from it."""
    peak_forward_backward_bytes: int | None = None
    """Peak of allocated GPU memory in forward and backward, the largest of the passes. None without a GPU.

    Bridge samples memory after the step, when states may be on the GPU again, so its own figure hides the saving.
    """
    peak_step_bytes: int | None = None
    """Peak of allocated GPU memory in the rest of the step: reload, optimizer step, offload. None without a GPU."""
    planned_peak_bytes: int | None = None
    """Peak of allocated GPU memory that the step was planned to keep under. None in the first steps, which measure, and
    without a GPU."""
    peak_reserved_bytes: int | None = None
    """Peak of GPU memory that PyTorch's allocator reserved in the step, which other processes cannot use. None without
    a GPU."""
    optimizer_step_seconds: float | None = None
    """GPU time of the optimizer step, including its waits for copies. It is one step old, because the GPU reports it
    late. None without a GPU."""

    def scalars(self) -> dict[str, float]:
        """Return the figures for TensorBoard and W&B, by tag."""
        names = ("released_bytes", "bytes_offloaded", "bytes_reloaded", "pinned_bytes", "passes", "enqueue_seconds")
        optional = ("peak_forward_backward_bytes", "peak_step_bytes", "planned_peak_bytes", "peak_reserved_bytes")
        optional += ("optimizer_step_seconds",)
        values = asdict(self)
        names += GRADIENT_FIGURES if self.gradient_bytes else ()
        names += FILE_FIGURES if self.file_bytes_written or self.file_bytes_read else ()
        return {f"bridge_fgo/{n}": values[n] for n in (*names, *optional) if values[n] is not None}


FORWARD_BACKWARD, REST = "peak_forward_backward_bytes", "peak_step_bytes"


class Peaks:
    """Peaks of allocated GPU memory of one training step by phase: in forward and backward, and in the rest of it."""

    def __init__(self, meter: PeakMeter) -> None:
        self.meter = meter
        self._found: dict[str, int | None] = {}  # by their names in `Stats`

    def begin_step(self) -> None:
        """Start a new training step."""
        self.meter.end_phase()  # what came between the steps is nobody's: an evaluation, before the first the model
        self.meter.reserved_bytes = 0
        self._found = dict.fromkeys((FORWARD_BACKWARD, REST))

    def end_phase(self, phase: str) -> None:
        """Note that a phase is over; there may be several passes."""
        if (peak := self.meter.end_phase()) is not None:
            self._found[phase] = max(peak, self._found.get(phase) or 0)

    def figures(self) -> dict[str, int | None]:
        """Return the peaks by their names in `Stats`; None without a GPU."""
        return {**self._found, "peak_reserved_bytes": self.meter.reserved_bytes if self.meter.works else None}


class Figures:
    """Collects the figures of one session, of its states and gradients; `snapshot` gives them as a `Stats`."""

    def __init__(self, engine: Engine, mcore: str, meter: PeakMeter, gradients: Gradients | None = None) -> None:
        self._engine, self._gradients = engine, gradients
        self._traffic_of_gradients = Traffic() if gradients is None else gradients.traffic
        self._peaks = Peaks(meter)
        self.step_clock = StepClock(meter)
        self._before: list[dict[str, float]] = []
        self._passes = 0
        self._now = Stats(
            engine.name,
            mcore,
            state_bytes=engine.state_bytes,
            offloaded_bytes=engine.planned_bytes,
            pin_seconds=engine.pin_seconds,
            gradient_bytes=0 if gradients is None else gradients.nbytes,
        )

    @property
    def peak_allocated_bytes(self) -> int | None:
        """Peak of allocated GPU memory of the newest step; None without a GPU."""
        peaks = [p for p in (self._now.peak_forward_backward_bytes, self._now.peak_step_bytes) if p is not None]
        return max(peaks, default=None)

    def snapshot(self) -> Stats:
        """Return the figures as they are now."""
        engine, gradients = self._engine, self._gradients
        return replace(
            self._now,
            pinned_bytes=engine.pinned_bytes + (0 if gradients is None else gradients.pinned_bytes),
            touched_bytes=engine.traffic.touches.nbytes,
            failed_fetches=engine.failed_fetches,
        )

    def begin_step(self) -> None:
        """Start a new training step."""
        self._before = self._counted()
        measured = self.step_clock.seconds()
        self.step_clock.begin_step()
        if measured is not None:
            self._now = replace(self._now, optimizer_step_seconds=measured)
        self._passes = 0
        self._peaks.begin_step()

    def _counted(self) -> list[dict[str, float]]:
        traffics = (self._engine.traffic, self._traffic_of_gradients)
        return [{name: getattr(traffic, name) for name in COUNTERS} for traffic in traffics]

    def released(self) -> None:
        """Note a release; forward and backward begin."""
        self._peaks.end_phase(REST)
        self._passes += 1

    def reloading(self) -> None:
        """Note that forward and backward are done and the rest of the reload is about to take memory."""
        self._peaks.end_phase(FORWARD_BACKWARD)

    def end_step(self) -> None:
        """Finish the step."""
        self._peaks.end_phase(REST)
        states, gradients = (
            {name: now[name] - before[name] for name in COUNTERS}
            for now, before in zip(self._counted(), self._before, strict=True)
        )
        self._now = replace(
            self._now,
            steps=self._now.steps + 1,
            passes=self._passes,
            released_bytes=self._engine.traffic.most_released,
            bytes_offloaded=int(states["out"]),
            bytes_reloaded=int(states["back"]),
            file_bytes_written=int(states["to_file"]),
            file_bytes_read=int(states["from_file"]),
            file_wait_seconds=states["file_seconds"],
            gradient_bytes_offloaded=int(gradients["out"]),
            gradient_bytes_reloaded=int(gradients["back"]),
            enqueue_seconds=states["seconds"] + gradients["seconds"],
            planned_peak_bytes=self._engine.planned_peak_bytes,
            **self._peaks.figures(),
        )
