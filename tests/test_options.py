"""Every command line has the options of OffloadConfig, and what it was given is what OffloadConfig gets."""

import argparse
import dataclasses
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from bridge_fgo.config import MIB, OffloadConfig
from bridge_fgo.tools import main, options

GIVEN = {
    "engine": ("native", "native"),
    "moments": (False, False),
    "master_weights": (False, False),
    "master_remainders": (False, False),
    "fraction": (0.5, 0.5),
    "gpu_memory_budget_gib": (70.5, 70.5),
    "gradients": (True, True),
    "slab_bytes": (64 * MIB, 64 * MIB),
    "piece_bytes": (8 * MIB, 8 * MIB),
    "pin_memory": (False, False),
    "measure": (True, True),
    "activation_waits": (True, True),
}
"""A value for each option, and the setting's."""


def test_every_setting_has_an_option_whose_help_is_a_sentence_and_what_is_not_given_keeps_its_default():
    names = [field.name for field in dataclasses.fields(OffloadConfig)]
    assert [option.setting for option in options.OPTIONS] == names == list(GIVEN)
    assert [option.flag for option in options.OPTIONS] == [f"--{name.replace('_', '-')}" for name in names]
    for option in options.OPTIONS:
        assert 20 < len(option.help) < 140 and option.help.endswith(".")
    assert options.settings(vars(options.OffloadOptions())) == {}
    assert options.command_line(vars(options.OffloadOptions())) == []
    assert seen_by_typer([]) == [(2, {})]


def seen_by_typer(words: list[str]) -> Any:
    seen: list[Any] = []
    app = typer.Typer()

    @app.command()
    @options.takes_offload_options
    def command(before: int = 1, *, offload: dict[str, Any]) -> None:
        seen.append((before, offload))

    done = CliRunner().invoke(app, ["--before", "2", *words])
    assert done.exit_code == 0, done.output
    return seen


@pytest.mark.parametrize("option", options.OPTIONS, ids=lambda option: option.setting)
def test_an_option_goes_from_a_job_over_its_command_line_to_the_setting(option: options.Option) -> None:
    given, setting = GIVEN[option.setting]
    job = options.OffloadOptions(**{option.setting: given})
    assert options.settings(vars(job)) == {option.setting: setting}
    assert seen_by_typer(options.command_line(vars(job))) == [(2, {option.setting: setting})]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", {}),
        ("--engine mcore", {"engine": "mcore"}),
        ("--no-moments", {"moments": False}),
        ("--master-remainders", {"master_remainders": True}),
        ("--no-master-remainders", {"master_remainders": False}),
        ("--fraction 0.5", {"fraction": 0.5}),
        ("--gpu-memory-budget-gib 2", {"gpu_memory_budget_gib": 2.0}),
        ("--gpu-memory-budget-gib auto", {"gpu_memory_budget_gib": "auto"}),
        ("--gradients lazy", {"gradients": "lazy"}),
        ("--gradients true", {"gradients": True}),
        ("--gradients False", {"gradients": False}),
        ("--slab-bytes 2000000 --piece-bytes 70000", {"slab_bytes": 2_000_000, "piece_bytes": 70_000}),
    ],
)
def test_argparse_takes_the_same(words: str, expected: dict[str, Any]) -> None:
    parser = argparse.ArgumentParser()
    options.add_offload_options(parser)
    assert options.offload_config(parser.parse_args(words.split())) == OffloadConfig(**expected)


@pytest.mark.parametrize("word", ["auto", "much"])
def test_a_number_or_a_word_is_taken_and_nothing_else(word: str) -> None:
    app, seen = typer.Typer(), []

    @app.command()
    @options.takes_offload_options
    def command(*, offload: dict[str, Any]) -> None:
        seen.append(offload)

    done = CliRunner().invoke(app, ["--gpu-memory-budget-gib", word])
    if word == "auto":
        assert seen == [{"gpu_memory_budget_gib": "auto"}]
        assert options.settings({"gpu_memory_budget_gib": "7.5"}) == {
            "gpu_memory_budget_gib": 7.5
        }  # as NeMo-Run may hand it on
        assert options.command_line({"gpu_memory_budget_gib": "auto"}) == ["--gpu-memory-budget-gib", "auto"]
    else:
        assert done.exit_code == 2 and "--gpu-memory-budget-gib" in done.output


@pytest.mark.parametrize("name", ["run", "demo", "bench", "report", "plan", "doctor"])
def test_help_has_an_example_and_the_words_that_an_option_takes(name: str) -> None:
    text = CliRunner().invoke(main.app, [name, "--help"]).output
    assert f"Example: bridge-fgo {name} " in text
    assert ("--gpu-memory-budget-gib <auto|float>" in text) == (name in ("run", "plan", "doctor"))
