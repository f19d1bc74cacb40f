"""An arm that trains nothing: `python -m turning_arm` with the options of a GPU arm that matter for its turns.

Each step is a line of `--diary`, a file that all arms append to. `--die-in TURN` has rank 1, or the only rank, end with
an error in its turn of that number.
"""

import argparse
import os
import sys
import time

from harness.arms.turns import TurnTaker

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int)
parser.add_argument("--turns")
parser.add_argument("--events")
parser.add_argument("--name")
parser.add_argument("--diary")
parser.add_argument("--die-in", type=int)
options = parser.parse_args()
rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
turns = TurnTaker(options.turns, ranks)


def write(line, path):
    with open(path, "a") as file:
        file.write(line + "\n")


for step in range(1, options.steps + 2):  # one more, for what comes after those that are measured
    if not turns.has_another_step():
        turns.take()
    if options.die_in == turns.turn and rank == ranks - 1:
        sys.exit(f"it died in turn {turns.turn}")
    write(f"{turns.turn} {options.name} {rank} begin", options.diary)
    time.sleep(0.002)
    write(f"{turns.turn} {options.name} {rank} end", options.diary)
    if rank == 0 and step <= options.steps:
        write(f'{{"event": "step", "step": {step}, "seconds": 0.1, "turn": {turns.turn}}}', options.events)
if rank == 0:
    write('{"event": "result", "ok": true}', options.events)
