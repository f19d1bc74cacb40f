"""`bridge-fgo keep`: the keeper of a node, and the command whose crashes it outlives. No torch and no Megatron here."""

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from bridge_fgo.memory.host_memory import available_bytes
from bridge_fgo.memory.keeper import VARIABLE, Keeper, job_name

SHARE = 0.9  # of the memory that is available as the keeper starts: the most that it holds by default
RESTARTS = 3  # of a script that `bridge-fgo run` keeps
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
IDLE_MINUTES = 60.0


def keep(
    command: Sequence[str], restarts: int = 0, memory_gib: float | None = None, idle_minutes: float = IDLE_MINUTES
) -> int:
    """Keep while a command runs, which is started again as often as it fails, and return its status.

    Without a command keep until no trainer has been connected for a while, or a signal ends this process.

    Raises:
        ValueError: the job has a keeper already, or there is neither a command nor a name for the job.
    """
    if not command and not job_name():
        raise ValueError(f"give a COMMAND to run, or set {VARIABLE} to a name for the keepers of this job")
    os.environ[VARIABLE] = job_name() or secrets.token_hex(8)
    limit = SHARE * available_bytes() if memory_gib is None else memory_gib * 2**30
    keeper = Keeper(job_name(), limit, 60 * idle_minutes)
    if not command:
        keeper.serve()
        return 0
    ended: list[int] = []  # signals that end this process, and so the command for good
    while (status := _run(command, keeper, ended)) and not ended and restarts > 0:
        restarts -= 1
        print(f"bridge-fgo keep: {command[0]} has ended with status {status}: it is started again", file=sys.stderr)
    return status


def _run(command: Sequence[str], keeper: Keeper, ended: list[int]) -> int:
    try:
        child = subprocess.Popen(command)
    except OSError as error:
        raise ValueError(f"COMMAND {command[0]!r} cannot be run: {error.strerror}") from None

    def pass_on(number: int, frame: Any) -> None:
        ended.extend({number}.intersection(ENDING))
        child.send_signal(number)

    for number in (*ENDING, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, pass_on)
    process = os.pidfd_open(child.pid)
    keeper.serve(process)
    os.close(process)
    status = child.wait()
    return status if status >= 0 else 128 - status


def is_needed(settings: dict[str, Any]) -> bool:
    """Return whether `bridge-fgo run` is to keep: the settings ask for it, nobody keeps, and no launcher runs it."""
    launched = any(os.environ.get(name) for name in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"))
    return bool(settings.get("survive_crash")) and not job_name() and not launched
