"""A Slurm of one node on this machine, for tests: Debian's slurmctld and slurmd, without authentication."""

import contextlib
import os
import shutil
import socket
import subprocess
import time

from forked import PATIENCE

CONFIG = """\
ClusterName=test
SlurmctldHost={host}
SlurmUser=root
AuthType=auth/none
CredType=cred/none
SlurmctldPort={ctld_port}
SlurmdPort={slurmd_port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
KillWait=2
NodeName={host} CPUs={cpus} RealMemory=1000 State=UNKNOWN
PartitionName=cpu Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_not():
    """Return why no Slurm can be started here, or None."""
    missing = [tool for tool in ("slurmctld", "slurmd", "sbatch") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not installed (Debian: slurmctld, slurmd, slurm-client)"
    return None if os.geteuid() == 0 else "slurmd needs root"


def free_ports(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("", 0))
        return [each.getsockname()[1] for each in sockets]


@contextlib.contextmanager
def cluster(folder):
    """Start the daemons in a folder; yields the environment for Slurm's commands, and ends the daemons."""
    host = socket.gethostname().split(".")[0]
    ctld_port, slurmd_port = free_ports(2)
    for name in ("state", "spool"):
        (folder / name).mkdir()
    settings = dict(host=host, folder=folder, ctld_port=ctld_port, slurmd_port=slurmd_port, cpus=os.cpu_count())
    (folder / "slurm.conf").write_text(CONFIG.format(**settings))
    # Tests before this one have had mcore choose an attention for other models, which it notes in the environment.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NVTE_")}
    environment["SLURM_CONF"] = str(folder / "slurm.conf")
    with contextlib.ExitStack() as stack:
        for daemon in ("slurmctld", "slurmd"):
            log = stack.enter_context(open(folder / f"{daemon}.log", "w"))
            process = subprocess.Popen([daemon, "-D"], env=environment, stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.terminate)
        wait_until(lambda: output(["sinfo", "-h", "-o", "%T"], environment) == "idle")
        yield environment
        output(["scancel", "--user=root"], environment)


def output(command, environment):
    """Return what a command of Slurm printed, stripped; whether it failed is the caller's to see."""
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stdout.strip()


def wait_until(condition, describe=lambda: ""):
    """Wait for a condition to hold; raises AssertionError with what is described after PATIENCE."""
    ends = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < ends, f"not within {PATIENCE} s\n{describe()}"
        time.sleep(0.2)


def wait_for_job(job, environment):
    """Wait until a job has left the queue."""
    wait_until(
        lambda: output(["squeue", "-h", "-j", job], environment) == "",
        lambda: output(["scontrol", "show", "job", job], environment),
    )
