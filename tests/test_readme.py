"""The pages are short, and true of the code."""

import ast
import dataclasses
import importlib
import re
from pathlib import Path

import claims
import pytest

from bridge_fgo.config import OffloadConfig
from bridge_fgo.offload import schedule

ROOT = Path(__file__).parents[1]
MOST_WORDS = {"README.md": 1000, "CHANGELOG.md": 900}
MOST_OF_ALL = 10_000
"""Words of the pages that are written by hand, as `wc` counts them, without the changelog."""
CODE = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)
LINK = re.compile(r"\]\(([^)]+)\)")
PAGES = [
    "README.md", "bridge_fgo/README.md", "bridge_fgo/tools/README.md", "tests/harness/README.md",
    "tests/tools/reach.md", "bridge_fgo/sleep/README.md", "bridge_fgo/sleep/PEERS.md", "patches/README.md",
    "recipes/README.md", "tests/README.md",
]  # fmt: skip


def text_of(page):
    return (ROOT / page).read_text()


@pytest.mark.parametrize("page", MOST_WORDS)
def test_a_page_is_read_in_one_sitting(page):
    """Words as a reader meets them: without code blocks, whose lines are copied and not read."""
    assert len(CODE.sub("", text_of(page)).split()) <= MOST_WORDS[page]


def test_all_pages_together_are_short():
    assert sum(len(text_of(page).split()) for page in PAGES if page != "tests/tools/reach.md") <= MOST_OF_ALL


def test_readme_names_the_test_command_that_ci_runs():
    command = "uv run pytest -n 2 --dist worksteal"
    assert command in text_of("README.md")
    assert f"{command} -m 'not gpu'" in (ROOT / ".ci/run").read_text().splitlines(), "with the slow lane"


def anchors_of(path):
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", CODE.sub("", path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, "CHANGELOG.md"])
def test_links_of_a_page_resolve(page):
    gone = []
    for target in LINK.findall(CODE.sub("", text_of(page))):
        path, _, anchor = target.partition("#")
        found = (ROOT / page).parent / path if path else ROOT / page
        if "://" not in target and not (found.exists() and (not anchor or anchor in anchors_of(found))):
            gone.append(target)
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


def test_a_package_indexs_links_lead_somewhere_and_it_names_the_files_that_readme_links_to(description):
    """The files beside README are not there."""
    targets = LINK.findall(CODE.sub("", description))
    assert len(targets) >= 2 and all(target.startswith("https://") for target in targets)
    named = re.findall(r"`([^`]+)` in the source distribution", description)
    relative = [t for t in re.findall(r"\]\(([^)#]+)\)", CODE.sub("", text_of("README.md"))) if "://" not in t]
    assert named == relative and all((ROOT / path).exists() for path in named)
    assert CODE.findall(description) == CODE.findall(text_of("README.md")), "commands are as they were"


def test_the_table_of_claims_is_what_the_tests_say():
    assert text_of("tests/README.md") == claims.page(), "run `python tests/claims.py`"
    assert claims.rows().count("\n") > 50


def test_the_functions_of_the_time_line_of_a_step_are_there():
    named = re.findall(r"`((?:\w+\.)+\w+|[A-Z]\w+)`", schedule.__doc__)
    files = list((ROOT / "bridge_fgo").rglob("*.py"))
    defined = {*re.findall(r"^ *(?:def|class) (\w+)", "\n".join(map(Path.read_text, files)), re.MULTILINE)}
    defined |= {path.stem for path in files} | {path.parent.name for path in files}
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
