"""`bridge-fgo run`: the script sees what it sees under `python script.py`, plus the package."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bridge_fgo.tools import run_script

ROOT = Path(__file__).resolve().parents[2]

# The application in a process of its own, with an install() that only notes what it was given: these tests are about
# the script's surroundings, on any machine.
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
CRASH = "def inner():\n    raise ValueError('told you')\n\ninner()\n"


def start(*words, python=("-c", DRIVER), path=(), cwd=None):
    """Run `bridge-fgo` with words; returns what it ended with."""
    paths = filter(None, [str(ROOT), *path, os.environ.get("PYTHONPATH")])
    return subprocess.run(
        [sys.executable, *python, *map(str, words)],
        capture_output=True, text=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)}, cwd=cwd, timeout=300,
    )  # fmt: skip


@pytest.fixture
def script(tmp_path):
    """Returns a function that writes a script and returns its path."""

    def write(text, name="train.py"):
        path = tmp_path / "scripts" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    return write


def shown(outcome):
    assert outcome.returncode == 0, outcome.stderr
    return json.loads(outcome.stdout)


def frames_of(outcome):
    """Return the files of a traceback's frames."""
    return [line.split('"')[1] for line in outcome.stderr.splitlines() if line.lstrip().startswith("File ")]


def test_the_script_is_main_and_gets_its_own_words_and_the_package_those_before_it(script):
    path = script("import neighbour\n" + SHOW)
    script("", "neighbour.py")
    options = "--engine native --fraction 0.5 --slab-bytes 67108864 --piece-bytes 8388608 --no-moments"
    own = ["--help", "--fraction", "0.1", "-x", "--a=b", "--", "plain", "", "two words"]
    assert shown(start("run", *options.split(), path, *own)) == {
        "argv": [str(path), *own], "path": str(path.parent), "name": "__main__", "file": str(path),
        "config": {"engine": "native", "fraction": 0.5, "slab_bytes": 64 * 2**20, "piece_bytes": 8 * 2**20,
                   "moments": False, "master_weights": True},
    }  # fmt: skip


def test_a_linked_script_finds_its_neighbours_a_safe_path_stays_safe_and_a_module_runs(script, tmp_path):
    link, path = tmp_path / "link.py", script(SHOW)
    link.symlink_to(path)
    seen = shown(start("run", link))
    assert (seen["path"], seen["argv"]) == (str(path.parent.resolve()), [str(link)])
    assert shown(start("run", path, python=("-P", "-c", DRIVER)))["path"] != str(path.parent)
    seen = shown(start("run", "--fraction", "0.5", "-m", "train", "--help", cwd=path.parent))
    assert (seen["name"], seen["file"], seen["argv"][1:]) == ("__main__", str(path), ["--help"])


@pytest.mark.parametrize(
    ("text", "status", "said"),
    [("7", 7, ""), ("", 0, "bridge-fgo run: nothing was offloaded"), ("'no luck'", 1, "no luck")],
)
def test_the_exit_status_is_the_scripts(script, text, status, said):
    outcome = start("run", script(f"import sys; sys.exit({text})"))
    assert outcome.returncode == status and outcome.stderr.strip().startswith(said)


@pytest.mark.parametrize(
    ("error", "python"),
    [("ValueError", ("-m", "bridge_fgo")), ("EOFError", ("-c", DRIVER)), ("BrokenPipeError", ("-c", DRIVER)),
     ("KeyboardInterrupt", ("-c", DRIVER))],
)  # fmt: skip
def test_the_package_is_installed_and_an_exception_ends_in_the_traceback_of_the_script_alone(script, error, python):
    # install() without settings returns the handle of what is installed, if anything is.
    installs = "import bridge_fgo\nprint(bridge_fgo.install().config.fraction)\n" if "-m" in python else ""
    path = script(installs + CRASH.replace("ValueError", error))
    outcome = start("run", "--fraction", "0.25", path, python=python)
    assert outcome.stdout == ("0.25\n" if installs else "")
    assert outcome.returncode == 1 or error == "KeyboardInterrupt"
    assert "Traceback (most recent call last):" in outcome.stderr
    assert frames_of(outcome) == [str(path)] * 2
    assert outcome.stderr.rstrip().endswith(f"{error}: told you")
    assert "During handling" not in outcome.stderr and "Aborted" not in outcome.stderr


# A config as Bridge would validate it, through the wrapper that the package puts around that.
VALIDATE = """
import sys
from types import SimpleNamespace
from bridge_fgo.bridge.before_training import validate_config
from bridge_fgo.bridge.settings import caller
caller.refuses = True
optimizer = SimpleNamespace(offload_optimizer_states={flag})
validate_config(lambda: None, SimpleNamespace(optimizer=optimizer), (), {{}})
print(optimizer.offload_optimizer_states)
"""


@pytest.mark.parametrize(
    ("text", "options", "printed", "said"),
    [
        (VALIDATE.format(flag=False), (), "False\n", "nothing was offloaded: no config"),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (
                (VALIDATE.format(flag=True), (), "True\n", ""),
                (VALIDATE.format(flag=False), ("--offload",), "True\n", ""),
                ("pass", ("--offload",), "", "nothing was offloaded: {} trained with no config of Megatron-Bridge\n"),
            )
        ),
    ],
)
def test_a_flag_that_was_never_set_is_said_at_the_end(script, text, options, printed, said):
    outcome = start("run", *options, path := script(text))
    assert (outcome.returncode, outcome.stdout) == (0, printed)
    assert said.format(path) in outcome.stderr and ("nothing was offloaded" in outcome.stderr) == bool(said)


AGAIN = """
import json, os, sys
import bridge_fgo
from bridge_fgo.bridge.settings import installed_config
if "BEGAN" not in os.environ:
    os.chdir("/")
    os.execvpe(sys.executable, [sys.executable, "-X", "utf8", *HOW, *sys.argv[1:]], {**os.environ, "BEGAN": "1"})
from bridge_fgo.bridge import settings
print(json.dumps([sys.argv[1:], installed_config().fraction, settings.caller.sets_flag]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_module", [False, True])
def test_a_script_that_starts_itself_anew_has_the_package_again(script, is_module):
    """As Megatron-Bridge's scripts/training/run_recipe.py does, with the environment of its recipe."""
    how = '"-m", "train"' if is_module else "os.path.join(os.path.dirname(__file__), os.path.basename(__file__))"
    path = script(AGAIN.replace("HOW", f"[{how}]"))
    words = ["--offload", "--fraction", "0.5", *(["-m", "train"] if is_module else [path]), "--fraction", "9"]
    done = start("run", *words, python=("-m", "bridge_fgo"), path=[str(path.parent)], cwd=path.parent)
    assert shown(done) == [["--fraction", "9"], 0.5, True]


@pytest.mark.parametrize(
    ("path", "words", "place"),
    [
        ("/usr/bin/python3", ["python3", "-u", "-W", "ignore", "train.py", "-x"], 4),
        ("/usr/bin/python3", ["python3", "other.py", "train.py"], None),
        ("/usr/bin/python3", ["python3", "-c", "pass"], None),
        ("/usr/bin/python3", ["python3"], None),
        (b"/bin/sh", [b"sh", b"train.py"], None),
        (3, ["python3", "train.py"], None),
    ],
)
def test_the_package_is_put_between_pythons_options_and_the_script_and_in_no_other_program(
    tmp_path, monkeypatch, path, words, place
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    run = ["-m", "bridge_fgo", "run", "--offload"]
    expected = words if place is None else [*words[:place], *run, *words[place:]]
    assert run_script.with_run(path, words, tmp_path / "train.py", False, ["--offload"]) == expected
    assert run_script.with_run(path, words, Path("train"), True, ["--offload"]) == words
