"""Commands of a new user, right ones and mistakes: status, first line, what they import, and no traceback.

LIGHT commands import no torch, TORCH ones no Megatron: both are forked from a process that has their imports. BUILT
ones have a model built, by the process that all tests have for it.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cli import invoke
from forked import Server
from lanes import in_lanes

ROOT = Path(__file__).resolve().parents[2]
LIGHT, TORCH, BUILT = "light", "torch", "built"
PROGRAMS = {
    "launch": ["-m", "bridge_fgo.recipes.launch"],
    "train": ["-m", "bridge_fgo.recipes.train"],
    "apply.py": [str(ROOT / "patches" / "apply.py")],
}
"""By their first word, of commands that are not bridge-fgo's."""
NOT_IMPORTED = {LIGHT: {"torch", "megatron.core"}, TORCH: {"megatron.core"}}

COMMANDS = [
    ("--version", 0, "bridge-fgo ", LIGHT),
    ("--help", 0, "Usage: bridge-fgo", LIGHT),
    ("plan --help", 0, "Usage: bridge-fgo plan", LIGHT),
    ("recipes list", 0, "dsv4_flash_64gpu ", LIGHT),
    ("recipes table", 0, "What `bridge-fgo plan` said with megatron-bridge ", LIGHT),
    ("recipes table nothere", 2, "bridge-fgo recipes table: no recipe's name has nothere", LIGHT),
    ("plam", 2, "Usage: bridge-fgo", LIGHT),
    ("run nothere.py", 2, "bridge-fgo run: there is no script 'nothere.py'", LIGHT),
    ("BRIDGE_FGO_FRAMEWORKS=vrl run ok.py", 2, "bridge-fgo run: the environment variable BRIDGE_FGO_FRAMEWORKS", LIGHT),
    ("BRIDGE_FGO_HOST_MEMORY_LIMIT_GIB=64G run ok.py", 2, "bridge-fgo run: the environment variable BRIDGE_FG", LIGHT),
    ("run -m no_such_package.train", 2, "bridge-fgo run: -m no_such_package.train: there is no module", LIGHT),
    ("run ok.py", 0, "trained", TORCH),
    ("plan nothere.yaml", 2, "bridge-fgo plan: nothere.yaml: there is no such file", LIGHT),
    ("plan empty.yaml", 2, "bridge-fgo plan: empty.yaml: is empty", LIGHT),
    ("plan broken.yaml", 2, "bridge-fgo plan: broken.yaml: cannot be read as a run config", LIGHT),
    ("plan other.yaml", 2, "bridge-fgo plan: other.yaml: is not a saved run config", LIGHT),
    ("plan flat.yaml --gpus 8", 2, "bridge-fgo plan: flat.yaml: is not a saved run config", LIGHT),
    ("plan no_such_package.recipes:mine", 2, "bridge-fgo plan: recipe 'no_such_package.recipes:mine'", LIGHT),
    ("demo --rl --device tpu", 2, "Usage: bridge-fgo demo", LIGHT),
    ("report nothere.log", 2, "bridge-fgo report: ", TORCH),
    ("plan qwen3_30b_a3b_8gpu --system H100 --check", 1, "Does not fit on 8 GPUs of H100: peak ", TORCH),
    ("plan qwen3_235b_a22b_64gpu --system H200 --check optimizer.offload.gpu_memory_budget_gib=auto", 0,
     "Fits only with the offload on 64 GPUs of H200: peak ", TORCH),
    ("plan tiny --fraction 9", 2, "bridge-fgo plan: OffloadConfig.fraction=9.0", LIGHT),
    ("doctor llama3_70b_pretrain_64gpu_h100_bf16_config train.train_itres=3", 2, "bridge-fgo doctor: overrides "
     "train.train_itres=3: there is no setting train.train_itres; did you mean train.train_iters?", LIGHT),
    ("plan tiny fraction=0.5", 2, "bridge-fgo plan: overrides fraction=0.5: write optimizer.offload.fraction=", LIGHT),
    ("plan llama3_70b_64gpu gpus=64", 2, "bridge-fgo plan: overrides gpus=64: write --gpus VALUE", LIGHT),
    ("plan tiny optimizer.offload.gpu_memory_budget_gib=80GB", 2, "bridge-fgo plan: OffloadConfig.gpu_memory_budget_gib"
     "='80GB': use a number of GiB above 0, 'auto' or None", LIGHT),
    ("plan tiny --system A100", 2, "bridge-fgo plan: --system A100: use one of GB200", LIGHT),
    ("plan llama3_70b_64gpu --backward-seconds 1", 2, "bridge-fgo plan: --backward-seconds needs --forward", LIGHT),
    ("plan llama3_70b_64gpu --gpus 100", 2, "bridge-fgo plan: --gpus 100: not divisible by tensor 2 x pipeline 4 x "
     "context 1 parallel ranks; 64 or 128 GPUs would do", LIGHT),
    ("plan llama3_70b_64gpu --gpus 40", 2, "bridge-fgo plan: --gpus 40: train.global_batch_size=256 is not divisible "
     "by 5 replicas x train.micro_batch_size=1; 32 or 64 GPUs would do", LIGHT),
    ("plan llama3_70b_64gpu --gpus 1024", 2, "bridge-fgo plan: --gpus 1024: a replica has 2 microbatches, which "
     "pipeline 4 x 5 chunks does not divide; 512 GPUs would do", LIGHT),
    ("plan qwen3_30b_a3b_8gpu --gpus 60 train.micro_batch_size=2", 2, "bridge-fgo plan: --gpus 60: a pipeline", LIGHT),
    ("doctor", 1, "Cannot train here: ", TORCH),
    ("plan llama3_8b_pretrain_config", 2, "bridge-fgo plan: config.json of meta-llama/Meta-Llama-3-8B is ", LIGHT),
    ("plan llama3_70b", 2, "bridge-fgo plan: there is no recipe 'llama3_70b'; did you mean llama3_70b_64gpu or "
     "llama3_70b_pretrain_config or ", LIGHT),
    ("plan llama3_70b_pretrain_64gpu_h100_bf16_confg", 2, "bridge-fgo plan: there is no recipe "  # of as many GPUs
     "'llama3_70b_pretrain_64gpu_h100_bf16_confg'; did you mean llama3_70b_pretrain_64gpu_h100_bf16_config or ", LIGHT),
    ("plan llama3_70b_pretrain_96gpu_h100_bf16_config", 2, "bridge-fgo plan: there is no recipe "
     "'llama3_70b_pretrain_96gpu_h100_bf16_config'. `bridge-fgo recipes list`", LIGHT),
    ("plan nowhere.py:mine", 2, "bridge-fgo plan: recipe 'nowhere.py:mine': there is no file 'nowhere.py'", LIGHT),
    ("plan mycfg.py", 2, "bridge-fgo plan: mycfg.py: name the function that returns the config, mycfg.py:FUNCTION; it "
     "has ok, fails", LIGHT),
    ("plan nothere.log", 2, "bridge-fgo plan: there is no recipe and no file 'nothere.log'. `bridge-fgo", LIGHT),
    ("plan dsv4_flash_64gpu", 2, "bridge-fgo plan: recipe='dsv4_flash_64gpu' needs Megatron-LM's dev branch", LIGHT),
    ("train nothere", 2, "bridge_fgo.recipes.train: recipe='nothere': there is no such recipe", LIGHT),
    ("train tiny --hf-config mine", 2, "bridge_fgo.recipes.train: --hf-config mine: use auto, hub, kept, or", LIGHT),
    ("train tiny --no-offload --fraction 0.5", 2, "bridge_fgo.recipes.train: --no-offload with fraction: leave", LIGHT),
]  # fmt: skip

OF_THE_SECOND_HOUR = [
    ("plan llama3_70b_64gpu --link-gbs 0", 2, "bridge-fgo plan: --link-gbs 0.0: use a number of GB/s", LIGHT),
    ("plan llama3_70b_64gpu --check", 2, "bridge-fgo plan: --check needs --system, one of GB200", LIGHT),
    ("plan llama3_70b_64gpu --recommend", 2, "bridge-fgo plan: --recommend needs --system, one of", LIGHT),
    ("plan llama3_70b_pretrain_32gpu_h100_bf16_config --system H100 --recommend", 0,
     "Fits only with the offload on 32 GPUs of H100: peak ", BUILT),
    ("plan mycfg.py:ok train.train_itres=3", 2, "bridge-fgo plan: overrides train.train_itres=3: there is no setting "
     "train.train_itres; did you mean train.train_iters?", BUILT),  # it might have a class of its own
    ("plan mycfg:ok", 0, "Fits on GB200", BUILT),
    ("NVTE_FUSED_ATTN=1 plan mycfg.py:ok --json", 0, "{", BUILT),  # the model's own kernel is another one
    ("plan mycfg.py:fails", 2, "bridge-fgo plan: recipe 'mycfg.py:fails' could not be built: KeyError: ", BUILT),
    ("doctor llama3_70b_64gpu", 1, "Cannot train here: torch sees no GPU", BUILT),
    ("bench", 2, "bridge-fgo bench: torch sees no CUDA device here", TORCH),
    ("train llama3_70b_64gpu", 2, "bridge_fgo.recipes.train: recipe='llama3_70b_64gpu' needs GPUs", TORCH),
    ("launch --factory llama3_70b_64gpu account=ME gpu_memory_budget_gib=auto --dryrun", 0, "nothing is "
     "saved before the time limit ends, and the job is not queued again then: checkpoints=FOLDER", BUILT),
    ("launch --factory nothere account=ME --dryrun", 2, "pretrain: recipe='nothere'", BUILT),
    ("launch --factory", 2, "pretrain: ", BUILT),
    ("apply.py nowhere", 2, "patches/apply.py: ", LIGHT),
]  # fmt: skip
"""Status, first line that is no banner of NeMo-Run's, and the kind of what one tries next.

All of it is slow, and of the commands above those that import torch but one."""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "ok.py").write_text("print('trained')\n")
    (tmp_path / "empty.yaml").touch()
    (tmp_path / "broken.yaml").write_text("a: [")
    (tmp_path / "other.yaml").write_text("a: 1")
    (tmp_path / "flat.yaml").write_text("_target_: megatron.bridge.training.config.ConfigContainer\nmodel: 3")
    (tmp_path / "mycfg.py").write_text(
        "from bridge_fgo.recipes.tiny import tiny_config\n\ndef ok():\n    return tiny_config(on_cpu=False)\n\n"
        "def fails():\n    return {}['hidden_size']\n"
    )
    return tmp_path


SERVERS = {LIGHT: Server("bridge_fgo.tools.main"), TORCH: Server("torch", "bridge_fgo.tools.main")}
"""Processes that commands are forked from, by what these may import."""


def python(command):
    program, *rest = command
    return [sys.executable, *PROGRAMS.get(program, ["-m", "bridge_fgo", program]), *rest]


@pytest.mark.parametrize(
    ("command", "status", "first_line", "kind"),
    in_lanes([*COMMANDS, *OF_THE_SECOND_HOUR], [row for row in COMMANDS if row[3] != TORCH or row[0] == "run ok.py"]),
    ids=str,
)
def test_a_command_of_a_new_user(folder, monkeypatch, command, status, first_line, kind):
    added = {"PYTHONWARNINGS": "ignore", "HF_HOME": str(folder), "HF_HUB_OFFLINE": "1", "NEMORUN_HOME": str(folder)}
    words = command.split()
    while "=" in words[0]:
        added |= [words.pop(0).split("=")]
    how = {"cwd": folder, "env": os.environ | added}
    if words[0] == "launch":
        done = subprocess.run(python(words), capture_output=True, text=True, stdin=subprocess.DEVNULL, **how)
    elif kind is BUILT:
        for name, value in added.items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(folder)
        monkeypatch.syspath_prepend(folder)
        done = invoke(*words)
        done.returncode = done.exit_code
    else:
        done = SERVERS[kind].run(python(words), **how)
        assert not NOT_IMPORTED[kind] & done.imported
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    lines = (done.stdout + done.stderr).replace("Configuring global options", "").strip().splitlines()
    assert lines[0].startswith(first_line), lines[0]
    if status == 2 and first_line.startswith(("bridge-fgo ", "bridge_fgo.")):
        assert len(lines) == 1, "a mistake is answered in one line"


def test_no_tracebacks_where_the_environment_is_empty():
    command = [sys.executable, "-m", "bridge_fgo", "plan", "tiny", "--system", "H200"]
    done = subprocess.run(command, cwd=ROOT, env={}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("Fits on 1 GPU of H200")


def test_a_launch_without_nemo_run_says_how_to_install_it():
    module = "sys.modules['nemo_run'] = None; runpy.run_module('bridge_fgo.recipes.launch', None, '__main__')"
    command = [sys.executable, "-c", f"import runpy, sys; {module}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    said = "pretrain: NeMo-Run is not installed: pip install '.[nemo]' in a checkout of bridge_fgo"
    assert (done.returncode, done.stderr.strip()) == (2, said)


@pytest.mark.parametrize(("argument", "status"), [("--help", 0), ("--nonsense", 2)])
def test_patches_say_how_they_are_applied(argument, status):
    script = str(ROOT / "patches" / "apply.py")
    done = subprocess.run([sys.executable, script, argument], capture_output=True, text=True, check=False)
    assert done.returncode == status and "Traceback" not in done.stderr
    assert "FOLDER" in (done.stderr if status else done.stdout)
