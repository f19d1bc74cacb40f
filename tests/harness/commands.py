"""`bridge-fgo demo` and `bridge-fgo bench`. Nothing here imports torch, so that `--help` answers at once."""

from __future__ import annotations

import typer

from bridge_fgo.tools.settings import takes_settings
from harness import demo, rl_demo
from harness.bench import command as bench

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)


def run_demo(settings: demo.Settings) -> int:
    """Train a small model twice through Megatron-Bridge's own loop and compare.

    Exit status: 0 where the two runs are bitwise equal and the offloaded one released
    memory, 1 where not, 2 where a run failed.
    """
    return (rl_demo if settings.rl else demo).run(settings)


for name, settings, run, example in (
    ("demo", demo.Settings, run_demo, "--steps 10"),
    ("bench", bench.Settings, bench.run, "--arms resident,native --preset long"),
):
    app.command(name, epilog=f"Example: bridge-fgo {name} {example}")(takes_settings(settings, run, name))
