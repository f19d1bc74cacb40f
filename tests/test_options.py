"""Every command line has the options of OffloadConfig."""

import argparse
import dataclasses
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from bridge_fgo.config import OffloadConfig
from bridge_fgo.tools import main, options
from harness.arms import gpu

WORDS = {
    "": {},
    "--engine mcore": {"engine": "mcore"},
    "--no-moments": {"moments": False},
    "--no-master-weights": {"master_weights": False},
    "--master-remainders": {"master_remainders": True},
    "--no-master-remainders --measure": {"master_remainders": False, "measure": True},
    "--fraction 0.5": {"fraction": 0.5},
    "--gpu-memory-budget-gib 2": {"gpu_memory_budget_gib": 2.0},
    "--gpu-memory-budget-gib auto": {"gpu_memory_budget_gib": "auto"},
    "--host-memory-gib 100": {"host_memory_gib": 100.0},
    "--nvme-folder /disk": {"nvme_folder": "/disk"},
    "--gradients lazy": {"gradients": "lazy"},
    "--gradients true": {"gradients": True},
    "--gradients False": {"gradients": False},
    "--slab-bytes 2000000 --piece-bytes 70000": {"slab_bytes": 2_000_000, "piece_bytes": 70_000},
    "--survive-crash --copies-to-buddy-every 50": {"survive_crash": True, "copies_to_buddy_every": 50},
    "--no-pin-memory --activation-waits": {"pin_memory": False, "activation_waits": True},
}
"""Command lines, and the settings that each gives."""


def test_every_setting_has_an_option_whose_help_is_a_sentence():
    names = [field.name for field in dataclasses.fields(OffloadConfig)]
    assert [option.setting for option in options.OPTIONS] == names
    assert {name for expected in WORDS.values() for name in expected} == set(names)
    for option in options.OPTIONS:
        assert 20 < len(option.help) < 140 and option.help.endswith(".")


def seen_by_typer(words: list[str]) -> Any:
    """Return what a command gets, and its output if it fails."""
    seen: list[Any] = []
    app = typer.Typer()

    @app.command()
    @options.takes_offload_options
    def command(before: int = 1, *, offload: dict[str, Any]) -> None:
        seen.append((before, offload))

    done = CliRunner().invoke(app, ["--before", "2", *words])
    return seen if done.exit_code == 0 else (done.exit_code, done.output)


@pytest.mark.parametrize("words", WORDS)
def test_words_are_the_settings_in_typer_argparse_and_a_job_and_what_is_not_given_keeps_its_default(words: str) -> None:
    expected = WORDS[words]
    job = vars(options.OffloadOptions(**expected))
    assert options.settings(job) == expected
    assert seen_by_typer(words.split()) == seen_by_typer(options.command_line(job)) == [(2, expected)]
    parser = argparse.ArgumentParser()
    gpu.add_offload_options(parser)
    assert gpu.offload_config(parser.parse_args(words.split())) == OffloadConfig(**expected)


def test_a_number_may_be_its_text_and_another_word_is_refused() -> None:
    given = {"gpu_memory_budget_gib": "7.5"}  # as NeMo-Run may hand it on
    assert options.settings(given) == {"gpu_memory_budget_gib": 7.5}
    with pytest.raises(ValueError, match="host_memory_gib='much': use a number or auto"):
        options.settings({"host_memory_gib": "much"})
    status, said = seen_by_typer(["--gpu-memory-budget-gib", "much"])
    assert status == 2 and "--gpu-memory-budget-gib" in said


@pytest.mark.parametrize("name", ["run", "demo", "bench", "report", "plan", "doctor"])
def test_help_has_an_example_and_the_words_that_an_option_takes(name: str) -> None:
    text = CliRunner().invoke(main.app, [name, "--help"]).output
    assert f"Example: bridge-fgo {name} " in text
    assert ("--gpu-memory-budget-gib <auto|float>" in text) == (name in ("run", "plan", "doctor"))
