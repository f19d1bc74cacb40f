"""The options of `bridge-fgo bench`. Nothing here imports torch or Megatron."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from bridge_fgo.tools.bench.in_turn import WARM_UP_STEPS
from bridge_fgo.tools.bench.presets import BenchArm, arms, read_name, size_options
from bridge_fgo.tools.settings import option

Preset = Literal["short", "long", "moe", "slabs", "tight"]
Optimizer = Literal["adam", "muon", "dist_muon"]
Sharding = Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of one bench; ValueError where some do not go together, or there is no such arm."""

    arms: Annotated[
        str | None,
        option(
            "Which arms, resident first: resident,native,half,hybrid by default, mcore with --megatron-lm, "
            "fsdp_resident,fsdp with --fsdp. "
            "native:NAME=VALUE is one with a variable of its own, compared with resident:NAME=VALUE if that is there."
        ),
    ] = None
    preset: Annotated[Preset, option("What to train.")] = "short"
    steps: Annotated[
        int | None, option("Steps of each arm, 16 by default; from the 7th on they count. Not with --in-turn.", min=8)
    ] = None
    rounds: Annotated[int, option("With --in-turn: how often each arm has its turn.", min=1)] = 1
    in_turn: Annotated[
        bool,
        option(
            "Have all arms alive at once, and train a few steps in turn. All must fit on the GPUs side by side.",
            "--in-turn",
        ),
    ] = False
    turn_steps: Annotated[int, option("With --in-turn: steps of a turn, of which the first does not count.", min=2)] = 5
    time_limit: Annotated[
        float | None, option("With --in-turn: seconds after which no further round begins; those that are done count.")
    ] = None
    half_budget_gib: Annotated[
        float | None, option("Budget of the half arm; by default half of the saving, by the resident arm's peak.")
    ] = None
    gpus: Annotated[int | None, option("How many GPUs; all by default.", min=1)] = None
    tp: Annotated[int, option("Tensor-parallel GPUs, with sequence parallelism.", min=1)] = 1
    microbatches: Annotated[
        int | None, option("Microbatches of a step on each data-parallel rank; default: the preset's.", min=1)
    ] = None
    layers: Annotated[
        int | None, option("Layers of the model; default: the preset's. Fewer let arms fit side by side.", min=1)
    ] = None
    optimizer: Annotated[
        Optimizer,
        option("Muons need emerging-optimizers; their mcore arm also a patched Bridge, see the bench's page."),
    ] = "adam"
    fsdp: Annotated[
        Sharding | None,
        option("Two arms more, with Megatron-FSDP that shards this: E beside that of DistributedOptimizer."),
    ] = None
    full_graphs: Annotated[
        bool, option("Capture forward and backward of a step into one CUDA graph, in every arm.", "--full-graphs")
    ] = False
    megatron_lm: Annotated[
        list[Path] | None,
        option("Checkout of Megatron-LM's dev branch for an mcore arm; may be repeated.", metavar="DIR"),
    ] = None
    keep: Annotated[Path, option("Where all files go.", metavar="DIR")] = Path("bench")
    json_output: Annotated[bool, option("Print one JSON object only.", "--json")] = False
    traces: Annotated[bool, option("Profile two steps more an arm, and draw them (needs matplotlib).")] = True
    saves: Annotated[
        bool,
        option(
            "Have each arm but mcore save twice in the background, and measure how long the second save stalls "
            "training. DIR needs room for two checkpoints, and the host for one more in memory.",
            "--saves",
        ),
    ] = False
    verbose: Annotated[bool, option("Print every figure and what it tells, not only the main ones.", "--verbose")] = (
        False
    )
    arm_timeout: Annotated[float, option("Seconds after which an arm is given up.")] = 1800.0

    def __post_init__(self) -> None:
        kinds = {read_name(arm)[0] for arm in self.names}
        if self.full_graphs and self.fsdp is not None:
            raise ValueError(
                f"--full-graphs with --fsdp {self.fsdp}: Megatron-FSDP is not set up to be captured here; leave one out"
            )
        if not self.in_turn and (self.rounds > 1 or self.time_limit is not None):
            given = f"--rounds {self.rounds}" if self.time_limit is None else f"--time-limit {self.time_limit:g}"
            raise ValueError(f"{given}: only arms in turn train in rounds; give --in-turn too")
        if self.in_turn and self.steps is not None:
            raise ValueError("--steps with --in-turn: --rounds and --turn-steps say how many")
        if self.in_turn and self.saves:
            raise ValueError(
                "--in-turn with --saves: a background save would run into other arms' turns; leave one out"
            )
        if self.in_turn and "half" in kinds and self.half_budget_gib is None:
            raise ValueError(
                "--in-turn with the half arm: no resident arm has ended whose peak its budget could follow; give "
                "--half-budget-gib"
            )
        self.chosen()

    @property
    def names(self) -> list[str]:
        """The arms' names."""
        if self.arms is not None:
            return self.arms.split(",")
        found = ["resident", "native", *([] if self.in_turn or self.fsdp else ["half"])]
        found += [*(["mcore"] if self.megatron_lm else []), *(["fsdp_resident", "fsdp"] if self.fsdp else [])]
        return found + (["hybrid"] if self.optimizer == "adam" else [])

    @property
    def train_steps(self) -> int:
        """Steps of each arm that are not for its trace."""
        return WARM_UP_STEPS + self.rounds * self.turn_steps if self.in_turn else self.steps or 16

    def chosen(self) -> list[BenchArm]:
        """Return the arms."""
        checkouts = [str(path.resolve()) for path in self.megatron_lm or ()]
        return arms(self.names, checkouts, self.preset, self.optimizer, self.fsdp)

    def size(self) -> list[str]:
        """Return the arms' options that say what each trains; ValueError where as many GPUs cannot train that."""
        return size_options(self.preset, self.gpus or 1, self.tp, self.microbatches, self.layers)
