"""The options of `bridge-fgo plan`. Nothing here imports torch or Megatron."""

import math
from dataclasses import dataclass, field
from typing import Annotated

import typer

from bridge_fgo.config import readable
from bridge_fgo.tools.plan.systems import SYSTEMS, links
from bridge_fgo.tools.settings import JobSettings, option


@dataclass(frozen=True)
class Settings(JobSettings):
    """Settings of one estimate; seconds are of one microbatch on a rank.

    Raises:
        ValueError: settings that do not go together, or numbers that make no sense.
    """

    target: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE|CONFIG|LOG",
            help="A recipe, module:function, run_config.yaml, or the log of a job that ran out of memory.",
        ),
    ] = field()  # a plan is of a job that has to be named
    job: Annotated[str | None, option("RECIPE or CONFIG that LOG is of, where it does not say.")] = None
    system: Annotated[str | None, option("GB200, GB300, B200, B300, GH200, H200 or H100; all by default.")] = None
    link_gbs: Annotated[float | None, option("Measured link speed of a GPU, GB/s each way.")] = None
    forward_seconds: Annotated[float | None, option("A microbatch's forward on a rank.")] = None
    backward_seconds: Annotated[
        float | None, option("The same, with what it recomputes; twice the forward by default.")
    ] = None
    activations_gb: Annotated[float | None, option("Peak of a rank's activations in GB, instead of counting them.")] = (
        None
    )
    room_gib: Annotated[
        float | None, option("GiB of --system's GPU that a peak may have; all but a 16th by default.")
    ] = None
    check: Annotated[
        bool, option("Status 1 where the job does not fit --system with the flag as it is.", "--check")
    ] = False
    recommend: Annotated[bool, option("Say with which settings the job runs fastest on --system.", "--recommend")] = (
        False
    )
    phases: Annotated[
        bool, option("For reinforcement learning: what a sleep and a wake copy, and how long.", "--phases")
    ] = False
    host_memory_limit_gib: Annotated[
        float | None, option("With --phases: a Residency's limit of a rank's host memory, GiB.")
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        links(self.system, self.link_gbs, self.gpus_per_node)
        units = {"forward_seconds": "seconds", "backward_seconds": "seconds", "activations_gb": "GB", "room_gib": "GiB"}
        for name, unit in units.items():
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"--{name.replace('_', '-')} {value}: use a number of {unit} above 0")
        if (limit := self.host_memory_limit_gib) is not None and not (self.phases and limit > 0):
            raise ValueError(f"--host-memory-limit-gib {limit}: use a number of GiB above 0, with --phases")
        for name in ("check", "recommend", "room_gib"):
            if getattr(self, name) and self.system is None:
                raise ValueError(f"--{name.replace('_', '-')} needs --system, one of {', '.join(SYSTEMS)}")
        if self.room_gib and self.system and self.room_gib * 2**30 > (most := SYSTEMS[self.system.upper()].gpu_bytes):
            raise ValueError(f"--room-gib {self.room_gib}: the GPU of {self.system} has {readable(most)}")
        if self.backward_seconds is not None and self.forward_seconds is None:
            raise ValueError("--backward-seconds needs --forward-seconds")
