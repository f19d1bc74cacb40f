"""What the doctor says first: whether this machine can train."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from bridge_fgo.tools.doctor import command
from bridge_fgo.tools.job import job as job_module


def settings(**changes: object) -> command.Settings:
    return command.Settings(probe=False, json_output=True, **changes)


@pytest.mark.parametrize(
    ("missing", "gpus", "target", "reason"),
    [
        (["megatron-bridge"], [1], None, "megatron-bridge not installed"),
        ([], [], None, "torch sees no GPU"),
        ([], [], "tiny", ""),
        ([], [1], None, ""),
    ],
)
def test_what_keeps_a_machine_from_training_is_said(monkeypatch, missing, gpus, target, reason):
    monkeypatch.setattr(command, "missing_packages", lambda: missing)
    findings = SimpleNamespace(machine={"gpus": gpus}, target=target)
    said = command.lacking(findings)
    assert said.startswith(reason) and bool(said) == bool(reason)


def test_a_machine_that_cannot_train_is_status_1_and_its_facts_are_there(monkeypatch, capsys):
    for module in (command, job_module):
        monkeypatch.setattr(module, "missing_packages", lambda: ["megatron-bridge"])
    assert command.run(settings()) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"].startswith("Cannot train here: megatron-bridge not installed")
    assert found["machine"]["host_bytes"] > 0


def test_a_config_that_cannot_be_built_is_status_2_with_the_facts_of_the_machine(monkeypatch, capsys):
    monkeypatch.setattr(command, "missing_packages", list)
    monkeypatch.setattr(job_module, "missing_packages", list)
    monkeypatch.setattr(command, "ask_builder", lambda **_: {"mcore": "0.19.2", "error": "needs the dev branch"})
    assert command.run(settings(target="dsv4_flash_64gpu")) == 2
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert found["verdict"] == "Cannot train here: needs the dev branch"
    assert found["machine"]["host_bytes"] > 0 and said.err == "bridge-fgo doctor: needs the dev branch\n"


@pytest.mark.parametrize(
    ("lockable", "pinned", "said"),
    [
        (None, 10**9, "unlimited: enough"),
        (10**9, 10**8, "1.00 GB: enough"),
        (10**6, 10**9, "1.00 MB: less than the 1.00 GB that a rank pins"),
        (10**6, None, "1.00 MB: name a config to have it judged"),
    ],
)
def test_the_limit_on_page_locked_memory_is_judged(lockable, pinned, said):
    assert command._judged(lockable, pinned) == said
