"""README and the pages beside what they are about: short, and true of the code that is here."""

import ast
import dataclasses
import importlib
import re
from pathlib import Path

import pytest

from bridge_fgo.config import OffloadConfig

ROOT = Path(__file__).parents[1]
MOST_WORDS = 1000
CODE = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)
PAGES = [
    "README.md", "bridge_fgo/README.md", "bridge_fgo/tools/README.md", "tests/harness/README.md",
    "tests/tools/reach.md", "bridge_fgo/sleep/README.md", "bridge_fgo/sleep/PEERS.md", "patches/README.md",
    "recipes/README.md", "tests/README.md",
]  # fmt: skip


def text_of(page):
    return (ROOT / page).read_text()


def test_readme_is_read_in_one_sitting_and_names_the_test_command_that_ci_runs():
    """Words as a reader meets them: without code blocks, whose lines are copied and not read."""
    assert len(CODE.sub("", text_of("README.md")).split()) <= MOST_WORDS
    command = "uv run pytest -n 2 --dist worksteal"
    assert command in text_of("README.md")
    assert f"{command} -m 'not gpu'" in (ROOT / ".ci/run").read_text().splitlines(), "with the slow lane"


@pytest.mark.parametrize("page", PAGES)
def test_links_of_a_page_resolve(page):
    targets = re.findall(r"\]\(([^)#]+)\)", CODE.sub("", text_of(page)))
    gone = [t for t in targets if "://" not in t and not (ROOT / page).parent.joinpath(t).exists()]
    assert not gone


@pytest.mark.parametrize("page", PAGES)
def test_lines_of_a_page_fit_into_a_window(page):
    assert [line for line in text_of(page).splitlines() if len(line) > 140 and not line.startswith("|")] == []


@pytest.fixture(scope="module")
def description():
    """What a package index shows: README as the build's metadata has it."""
    from hatchling.metadata.core import ProjectMetadata
    from hatchling.plugin.manager import PluginManager

    return ProjectMetadata(str(ROOT), PluginManager()).core.readme


def test_a_package_indexs_links_lead_somewhere_and_it_names_the_files_of_readme_in_the_source_distribution(description):
    """The files beside README are not there."""
    targets = re.findall(r"\]\(([^)]+)\)", CODE.sub("", description))
    assert len(targets) >= 2 and all(target.startswith("https://") for target in targets)
    named = re.findall(r"`([^`]+)` in the source distribution", description)
    relative = [t for t in re.findall(r"\]\(([^)#]+)\)", CODE.sub("", text_of("README.md"))) if "://" not in t]
    assert named == relative and all((ROOT / path).exists() for path in named)
    assert CODE.findall(description) == CODE.findall(text_of("README.md")), "commands are as they were"


def test_the_files_that_the_table_of_tests_names_and_the_functions_of_the_time_line_are_there():
    rows = [line for line in text_of("tests/README.md").splitlines() if not line.startswith("| upstream's own")]
    named = re.findall(r"`((?:[\w/]+/)?test_\w+\.py)`", "\n".join(rows))
    assert len(named) > 20
    assert [name for name in named if not (ROOT / "tests" / name).is_file()] == []
    section = text_of("bridge_fgo/README.md").partition("\n## The time line")[2].partition("\n## ")[0]
    named = re.findall(r"(?<!\*)`(\w+(?:\.\w+)?)`(?!\*)", section)  # in italics: those of Bridge and mcore
    source = "\n".join(path.read_text() for path in (ROOT / "bridge_fgo").rglob("*.py"))
    defined = set(re.findall(r"^ *(?:def|class) (\w+)", source, re.MULTILINE))
    assert len(named) > 20
    assert [name for name in named if not defined.issuperset(name.split("."))] == []


def test_the_settings_of_the_table_are_settings_with_these_defaults():
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| `([^`]+)` \|", text_of("README.md"), re.MULTILINE)
    fields = {field.name: field.default for field in dataclasses.fields(OffloadConfig)}
    told = {name: ast.literal_eval(default) for names, default in rows for name in re.findall(r"\w+", names)}
    assert len(told) >= 5
    assert {name: fields.get(name, "no setting") for name in told} == told


def test_the_script_of_readme_imports_what_bridge_has_and_sets_the_flag(cpu_standins):
    script = next(body for language, body in CODE.findall(text_of("README.md")) if language == "python")
    for node in ast.walk(ast.parse(script)):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module)
            assert all(hasattr(module, alias.name) for alias in node.names), node.module
    assert "cfg.optimizer.offload_optimizer_states = True" in script
