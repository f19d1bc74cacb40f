"""The phases of a plan as tables, as JSON, and as the states of a picture."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from bridge_fgo.tools.iteration_picture import NAMES, State
from bridge_fgo.tools.plan.activations import WORKSPACES
from bridge_fgo.tools.plan.estimate import Estimate
from bridge_fgo.tools.plan.phases import ALONE, REFERENCE, REST, SLEEP, Phases
from bridge_fgo.tools.plan.report import gigabytes


def phases_json(phases: Phases) -> dict[str, Any]:
    """Return the phases as JSON takes them: bytes and seconds."""
    return {
        "stages": [
            asdict(stage) | {"moves": [asdict(move) | {"copied": move.copied} for move in stage.moves]}
            for stage in phases.stages
        ],
        "seconds": [{"system": link.name, "one_way": link.one_way, **seconds} for link, seconds in phases.seconds],
        "notes": phases.notes,
        "refusals": phases.refusals,
    }


def print_phases(console: Console, phases: Phases) -> None:
    """Print what a sleep frees, and what each move copies and how long that takes."""
    stage = phases.fullest
    freed = stage.params + stage.grads + stage.optimizer
    console.print(
        f"Asleep, the fullest rank of stage {stage.stage} frees {gigabytes(freed)} GB: "
        f"parameters {gigabytes(stage.params)}, "
        f"gradients {gigabytes(stage.grads)}, masters and moments {gigabytes(stage.optimizer)}",
        style="bold",
        markup=False,
    )
    table = Table(title="GB that cross the link", title_justify="left")
    table.add_column("move")
    for name in ("params", "grads", "optimizer", "all"):
        table.add_column(name, justify="right")
    for move in stage.moves:
        table.add_row(move.name, *map(gigabytes, (move.params, move.grads, move.optimizer, move.copied)))
    console.print(table)
    table = Table(title="Seconds", title_justify="left")
    table.add_column("move")
    for link, _ in phases.seconds:
        table.add_column(link.title, justify="right")
    for move in stage.moves:
        table.add_row(move.name, *(f"{seconds[move.name]:.3f}" for _, seconds in phases.seconds))
    console.print(table)
    for note in phases.notes:
        console.print(f"- {note}", markup=False)
    for refusal in phases.refusals:
        console.print(f"refused by Residency: {refusal}", markup=False, style="red")


def states_of_plan(phases: Phases, estimate: Estimate) -> list[State]:
    """Return the phases of an iteration of the fullest stage for `draw_iteration`.

    Seconds where one system was asked for. Activations that are not known are left out.
    """
    stage = phases.fullest
    activations = estimate.stages[stage.stage].activations or 0
    seconds = phases.seconds[0][1] if len(phases.seconds) == 1 else {}
    copied = {move.name: move.copied for move in stage.moves}
    none = {"params": 0, "grads": 0, "optimizer": 0, "reference": 0, "others": stage.stays}
    alone = none | {"params": stage.params}
    trained = alone | {"grads": stage.grads, "optimizer": stage.optimizer}
    awake = trained | {"others": stage.stays + activations + WORKSPACES}

    def state(phase: str, held: dict[str, int], move: str) -> State:
        return State(NAMES[phase], held, seconds.get(move), copied[move])

    return [
        State(NAMES["begins"], trained),
        state("asleep", none, SLEEP),
        state("params wake", alone, ALONE),
        state("reference wakes", alone | {"reference": stage.reference}, REFERENCE),
        state("awake", awake, REST),
    ]
