"""``bridge-fgo run``: the script sees what it sees under ``python script.py``, plus the package."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bridge_fgo import options
from bridge_fgo.config import OffloadConfig
from bridge_fgo.tools import run_script

ROOT = Path(__file__).resolve().parents[2]

# Runs the application in a process of its own, with an install() that only notes what it
# was given: these tests are about the script's surroundings, on any machine.
DRIVER = """
import sys
import bridge_fgo

def install(config=None):
    bridge_fgo.noted = config

bridge_fgo.install = install
from bridge_fgo.tools.main import app
app(sys.argv[1:], prog_name="bridge-fgo")
"""

SHOW = """
import json, sys
import bridge_fgo
config = bridge_fgo.noted
print(json.dumps({
    "argv": sys.argv, "path": sys.path[0], "name": __name__, "file": __file__,
    "config": {name: getattr(config, name) for name in
               ("engine", "fraction", "slab_bytes", "piece_bytes", "moments", "master_weights")},
}))
"""


def command_line(*arguments: object, python: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Runs ``bridge-fgo arguments...`` and returns its outcome."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    return subprocess.run(
        [sys.executable, *python, "-c", DRIVER, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
        check=False,
    )


@pytest.fixture
def script(tmp_path: Path) -> Any:
    """Returns a function that writes a script and returns its path."""

    def write(text: str, name: str = "train.py") -> Path:
        path = tmp_path / "scripts" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    return write


def shown(outcome: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert outcome.returncode == 0, outcome.stderr
    return json.loads(outcome.stdout)


def test_arguments_after_the_script_reach_it_verbatim(script: Any) -> None:
    path = script(SHOW)
    arguments = ["--help", "--engine", "native", "-x", "--a=b", "--", "plain", "", "two words"]
    assert shown(command_line("run", path, *arguments))["argv"] == [str(path), *arguments]


def test_the_script_is_main_and_finds_its_neighbours(script: Any) -> None:
    path = script("import neighbour\n" + SHOW)
    script("", "neighbour.py")
    seen = shown(command_line("run", path))
    assert (seen["name"], seen["file"], seen["path"]) == ("__main__", str(path), str(path.parent))


def test_a_linked_script_finds_the_neighbours_of_the_real_one(script: Any, tmp_path: Path) -> None:
    link = tmp_path / "link.py"
    link.symlink_to(script(SHOW))
    seen = shown(command_line("run", link))
    assert seen["path"] == str((tmp_path / "scripts").resolve())
    assert seen["argv"] == [str(link)]


def test_a_safe_path_stays_safe(script: Any) -> None:
    path = script(SHOW)
    assert shown(command_line("run", path, python=("-P",)))["path"] != str(path.parent)


def test_the_package_is_installed_with_the_options_before_the_script(script: Any) -> None:
    options = [
        "--engine",
        "native",
        "--fraction",
        "0.5",
        "--slab-bytes",
        str(64 * 2**20),
        "--piece-bytes",
        str(8 * 2**20),
        "--no-moments",
    ]
    assert shown(command_line("run", *options, script(SHOW), "--fraction", "0.1"))["config"] == {
        "engine": "native",
        "fraction": 0.5,
        "slab_bytes": 64 * 2**20,
        "piece_bytes": 8 * 2**20,
        "moments": False,
        "master_weights": True,
    }


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), {}),
        (("--gpu-memory-budget-gib", "70.5"), {"gpu_memory_budget_gib": 70.5}),
        (("--no-master-weights",), {"master_weights": False}),
        (("--no-moments",), {"moments": False}),
        (("--master-remainders",), {"master_remainders": True}),
        (("--no-master-remainders",), {"master_remainders": False}),
    ],
)
def test_an_option_sets_its_setting_and_no_other(script: Any, options: tuple[str, ...], expected: Any) -> None:
    path = script("import dataclasses, json, bridge_fgo\nprint(json.dumps(dataclasses.asdict(bridge_fgo.noted)))\n")
    defaults = dataclasses.asdict(OffloadConfig())
    assert shown(command_line("run", *options, path)) == defaults | expected


AGAIN = """
import json, os, sys
import bridge_fgo
from bridge_fgo.bridge.settings import installed_config
if "BEGAN" not in os.environ:
    os.chdir("/")
    os.execvpe(sys.executable, [sys.executable, "-X", "utf8", *HOW, *sys.argv[1:]], {**os.environ, "BEGAN": "1"})
from bridge_fgo.bridge import settings
print(json.dumps([sys.argv[1:], installed_config().fraction, settings._sets_flag]))
"""


@pytest.mark.parametrize("is_module", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_script_that_starts_itself_anew_has_the_package_again(script, is_module):
    """As Megatron-Bridge's scripts/training/run_recipe.py does, with the environment of its recipe."""
    how = '"-m", "train"' if is_module else "os.path.join(os.path.dirname(__file__), os.path.basename(__file__))"
    path = script(AGAIN.replace("HOW", f"[{how}]"))
    words = ["-m", "train"] if is_module else [str(path)]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{path.parent}"}
    command = [sys.executable, "-m", "bridge_fgo", "run", "--offload", "--fraction", "0.5", *words, "--fraction", "9"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, cwd=path.parent)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [["--fraction", "9"], 0.5, True]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/bin/sh", ["sh", "train.py"]),
        ("/usr/bin/python3", ["python3", "other.py", "train.py"]),
        ("/usr/bin/python3", ["python3", "-c", "pass"]),
        ("/usr/bin/python3", ["python3", "-m", "other"]),
        ("/usr/bin/python3", ["python3"]),
        (b"/bin/sh", [b"sh", b"train.py"]),
        (3, ["python3", "train.py"]),
    ],
)
def test_another_program_is_started_as_it_is(tmp_path, monkeypatch, path, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    assert run_script.with_run(path, words, tmp_path / "train.py", False, ["--offload"]) == words
    assert run_script.with_run(path, words, Path("train"), True, ["--offload"]) == words


def test_options_of_python_stay_before_the_package(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    words = ["python3", "-u", "-W", "ignore", "train.py", "-x"]
    found = run_script.with_run("/usr/bin/python3", words, tmp_path / "train.py", False, ["--offload"])
    assert found == [*words[:4], "-m", "bridge_fgo", "run", "--offload", "train.py", "-x"]


def test_options_not_given_keep_the_defaults_of_offload_config() -> None:
    assert options.settings({}) == {}
    assert options.settings({"master_weights": False, "slab_bytes": None}) == {"master_weights": False}
    assert options.settings({"master_remainders": False}) == {"master_remainders": False}


@pytest.mark.parametrize(("text", "status"), [("7", 7), ("", 0), ("None", 0), ("'no luck'", 1)])
def test_the_exit_status_is_the_scripts(script: Any, text: str, status: int) -> None:
    outcome = command_line("run", script(f"import sys; sys.exit({text})"))
    assert outcome.returncode == status
    assert outcome.stderr.strip().startswith(
        "no luck" if status == 1 else "bridge-fgo run: nothing" if not status else ""
    )


@pytest.mark.parametrize("error", ["ValueError", "EOFError", "BrokenPipeError"])
def test_an_exception_ends_in_pythons_own_traceback(script: Any, error: str) -> None:
    path = script(f"def inner():\n    raise {error}('told you')\n\ninner()\n")
    outcome = command_line("run", path)
    assert outcome.returncode == 1
    assert "Traceback (most recent call last):" in outcome.stderr
    assert f'File "{path}", line 2, in inner' in outcome.stderr
    assert outcome.stderr.rstrip().endswith(f"{error}: told you")
    assert "During handling" not in outcome.stderr


def test_an_interrupt_is_no_short_message(script: Any) -> None:
    outcome = command_line("run", script("raise KeyboardInterrupt"))
    assert "Aborted" not in outcome.stderr
    assert outcome.stderr.rstrip().endswith("KeyboardInterrupt")


def test_help_imports_neither_torch_nor_megatron() -> None:
    code = (
        "import sys\n"
        "from bridge_fgo.tools.main import app\n"
        "try:\n    app(['--help'])\n"
        "except SystemExit:\n    pass\n"
        "loaded = {'torch', 'megatron'} & set(sys.modules)\n"
        "sys.exit(f'loaded: {loaded}' if loaded else 0)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    outcome = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert outcome.returncode == 0, outcome.stderr
    assert "run" in outcome.stdout and "demo" in outcome.stdout


def test_python_dash_m_installs_the_package_for_the_script(script: Any) -> None:
    # install() without settings returns the handle of what is installed, if anything is.
    path = script("import bridge_fgo\nprint(bridge_fgo.install().config.fraction)\n")
    outcome = subprocess.run(
        [sys.executable, "-m", "bridge_fgo", "run", "--fraction", "0.25", path],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert (outcome.returncode, outcome.stdout) == (0, "0.25\n"), outcome.stderr


# A config as Bridge would validate it, through the wrapper that the package puts around that.
VALIDATE = """
import sys
from types import SimpleNamespace
from bridge_fgo.bridge import settings
optimizer = SimpleNamespace(offload_optimizer_states={flag})
settings.before_validation(optimizer)
settings.after_validation(optimizer)
print(optimizer.offload_optimizer_states)
"""


@pytest.mark.parametrize(
    ("options", "flag", "said"), [((), False, True), ((), True, False), (("--offload",), False, False)]
)
def test_a_flag_that_was_never_set_is_said_at_the_end(
    script: Any, options: tuple[str, ...], flag: bool, said: bool
) -> None:
    outcome = command_line("run", *options, script(VALIDATE.format(flag=flag)))
    assert outcome.returncode == 0
    assert outcome.stdout == f"{bool(options) or flag}\n"
    assert ("nothing was offloaded" in outcome.stderr) == said


def test_a_module_is_run_as_python_dash_m_runs_it(script: Any, monkeypatch: Any) -> None:
    path = script(SHOW, "trained.py")
    monkeypatch.chdir(path.parent)
    seen = shown(command_line("run", "--fraction", "0.5", "-m", "trained", "--help"))
    assert (seen["name"], seen["file"], seen["argv"][1:]) == ("__main__", str(path), ["--help"])


@pytest.mark.parametrize("as_module", [True, False])
def test_a_crash_shows_the_frames_of_the_script_alone(script: Any, as_module: bool) -> None:
    path = script("def inner():\n    raise ValueError('told you')\n\ninner()\n")
    if as_module:
        outcome = subprocess.run(
            [sys.executable, "-m", "bridge_fgo", "run", path], capture_output=True, text=True, cwd=ROOT, check=False
        )
    else:
        outcome = command_line("run", path)
    files = [line.split('"')[1] for line in outcome.stderr.splitlines() if line.lstrip().startswith("File ")]
    assert outcome.returncode == 1 and files == [str(path)] * 2, outcome.stderr
