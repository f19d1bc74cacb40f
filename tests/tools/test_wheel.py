"""What a wheel has, and what the commands of a checkout say in one."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder with what a wheel installs."""
    folder = tmp_path_factory.mktemp("site")
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    with zipfile.ZipFile(wheel) as file:
        file.extractall(folder)
    Path(wheel).unlink()
    return folder


def test_a_wheel_has_the_package_and_its_recipes_alone(site):
    assert sorted(path.name for path in site.iterdir() if not path.name.endswith(".dist-info")) == ["bridge_fgo"]
    assert (site / "bridge_fgo" / "recipes" / "tiny.py").is_file()


@pytest.mark.parametrize("command", ["demo --steps 3", "bench --help"])
def test_a_command_of_a_checkout_says_in_one_line_that_it_needs_one(site, command):
    done = subprocess.run(
        [sys.executable, "-m", "bridge_fgo", *command.split()], cwd=site, capture_output=True, text=True
    )
    name = command.split()[0]
    said = f"bridge-fgo {name}: needs a checkout of bridge_fgo: use `uv run bridge-fgo {name}` there\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)
