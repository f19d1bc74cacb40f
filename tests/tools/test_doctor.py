"""`bridge-fgo doctor` and `plan` as commands, and without Megatron."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from typer.testing import CliRunner

from bridge_fgo.memory.host_memory import Pool
from bridge_fgo.tools import job_commands
from bridge_fgo.tools.doctor import command, installed, machine
from bridge_fgo.tools.job import builder as builder_module
from bridge_fgo.tools.job import job as job_module
from bridge_fgo.tools.job.builder import plain_config
from bridge_fgo.tools.job.saved_config import load_saved_config
from bridge_fgo.tools.main import app
from bridge_fgo.tools.plan import report
from bridge_fgo.tools.plan.estimate import Estimate
from bridge_fgo.tools.plan.links import LINKS

GIB = 2**30


def run(*arguments: str):
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output


@pytest.fixture(autouse=True)
def lacks_nothing(monkeypatch):
    """This machine can train, by what is installed."""
    monkeypatch.setattr(command, "lacking", lambda findings: "")


@pytest.fixture
def no_megatron(monkeypatch):
    """Megatron cannot be found."""
    for module in (command, job_module):
        monkeypatch.setattr(module, "missing_packages", lambda: ["megatron-bridge", "megatron-core"])


@pytest.fixture(scope="module")
def saved(tmp_path_factory, cpu_standins):
    """A run config as Bridge saves it, of a small GPT with the flag set: 2 layers of 128, a vocabulary of 256."""
    import bridge_fgo
    from bridge_fgo.tools.arms.cpu_model import CpuOptions, make_config

    path = tmp_path_factory.mktemp("saved") / "run_config.yaml"
    with bridge_fgo.install():
        config = make_config(CpuOptions(offload=True))
        config.model.transformer_layer_spec = None
        config.to_yaml(str(path))
    return path


def changed(saved, tmp_path, before: str, after: str):
    text = saved.read_text()
    assert text.count(before) >= 1, before
    path = tmp_path / "run_config.yaml"
    path.write_text(text.replace(before, after))
    return str(path)


def test_a_saved_config_is_read_without_megatron(saved):
    config = load_saved_config(saved)
    assert config.optimizer.offload_optimizer_states is True
    assert config.optimizer.exp_avg_dtype is torch.float32 and config.model.pipeline_dtype is torch.bfloat16
    assert config.model.activation_func == "gelu" and config.model.hidden_size == 128


def test_one_distributed_optimizer_flag_turns_on_both_as_in_bridge(saved, tmp_path):
    text = saved.read_text()
    head, mark, tail = text.partition("\noptimizer:\n")
    path = tmp_path / "run_config.yaml"
    path.write_text(head + mark + tail.replace("use_distributed_optimizer: true", "use_distributed_optimizer: false"))
    assert load_saved_config(path).optimizer.use_distributed_optimizer is True


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[1, 2]", "is not a saved run config"),
        ("model: {}", "is not a saved run config"),
        ("a: {b", "cannot be read"),
        ("_target_: megatron.bridge.training.config.ConfigContainer", "no section model"),
    ],
)
def test_what_is_no_saved_config_is_refused_by_name(tmp_path, text, why):
    path = tmp_path / "run_config.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"run_config\.yaml: .*{why}"):
        load_saved_config(path)


def test_doctor_works_without_megatron_and_without_a_config(no_megatron):
    status, output = run("doctor", "--json")
    found = json.loads(output)
    assert status == 0 and found["refusals"] == []
    assert found["installed"]["torch"] == torch.__version__ and found["installed"]["mcore"] is None
    assert any("megatron-bridge" in note for note in found["notes"])


@pytest.mark.parametrize("arguments", [("plan", "tiny", "--picture"), ("report", "some.log", "--output")])
def test_a_file_in_no_folder_is_an_error_before_the_work(tmp_path, arguments):
    status, output = run(*arguments, str(tmp_path / "nosuch" / "file"))
    assert status == 2 and arguments[-1] in output and "there is no folder" in output


def test_settings_of_a_job_without_a_job_are_an_error(no_megatron):
    status, output = run("doctor", "--gpus", "64", "--fraction", "0.5")
    assert status == 2
    assert "gpus=64, fraction=0.5: of a job, and none is named" in output


@pytest.mark.parametrize("command", ["plan", "doctor"])
def test_a_saved_config_that_is_not_there_is_an_error_before_megatron_is_imported(monkeypatch, command):
    monkeypatch.setattr(job_commands, "_exit_with", lambda *of: pytest.fail("it was looked for by what imports"))
    status, output = run(command, "nosuch.yaml")
    assert (status, output) == (2, f"bridge-fgo {command}: nosuch.yaml: there is no such file\n")


def test_doctor_counts_the_states_of_a_saved_config_without_megatron(no_megatron, saved):
    status, output = run("doctor", str(saved), "--json")
    found = json.loads(output)
    assert status == 0, output
    assert found["config"]["flag"] is True and found["config"]["state_bytes"] == [12 * ELEMENTS]


@pytest.mark.parametrize(
    ("optimizer", "of_a_matrix"), [("adam", 12), ("muon", 8), ("dist_muon", 8), ("adaptive_muon", 12)]
)
def test_states_of_whole_parameters_are_counted_with_8_bytes_of_what_muon_updates(
    no_megatron, saved, tmp_path, optimizer, of_a_matrix
):
    path = changed(saved, tmp_path, "use_distributed_optimizer: true", "use_distributed_optimizer: false")
    path = changed(Path(path), tmp_path, "  optimizer: adam", f"  optimizer: {optimizer}")
    status, output = run("doctor", path, "--json")
    found = json.loads(output)
    assert status == 0 and found["refusals"] == [], output
    matrices = 2 * (4 * 128**2 + 8 * 128**2)
    others = 2 * (4 * 128 + 5 * 128 + 4 * 128) + 2 * 128 + 2 * 256 * 128
    assert found["config"]["state_bytes"] == [of_a_matrix * matrices + 12 * others]
    status, output = run("plan", path, "--json")
    assert status == 0, output


def test_states_that_the_plan_does_not_know_are_not_counted(no_megatron, saved, tmp_path):
    path = changed(saved, tmp_path, "  optimizer: adam", "  optimizer: sgd")
    status, output = run("plan", path)
    assert status == 2 and "optimizer.optimizer='sgd': the plan knows" in " ".join(output.split())


@pytest.fixture
def of_fsdp(saved, tmp_path):
    """The same config with Megatron-FSDP; a function of the strategy."""

    def made(strategy):
        path = changed(saved, tmp_path, "use_megatron_fsdp: false", "use_megatron_fsdp: true")
        before = "data_parallel_sharding_strategy: no_shard"
        return changed(Path(path), tmp_path, before, f"data_parallel_sharding_strategy: {strategy}")

    return made


ELEMENTS = 2 * (4 * 128**2 + 4 * 128 + 8 * 128**2 + 5 * 128 + 4 * 128) + 2 * 128 + 2 * 256 * 128


@pytest.mark.parametrize(
    ("strategy", "spread"), [("no_shard", ()), ("optim", ("masters", "moments")),
    ("optim_grads", ("masters", "moments", "gradients")),
    ("optim_grads_params", ("masters", "moments", "gradients", "parameters"))],
)  # fmt: skip
def test_each_strategy_of_megatron_fsdp_has_its_bytes_a_rank_and_a_node(no_megatron, of_fsdp, strategy, spread):
    status, output = run("plan", of_fsdp(strategy), "--gpus", "16", "--system", "H200", "--json")
    told = json.loads(output)
    assert status == 0 and told["refusals"] == [], output
    (stage,), (link,) = told["stages"], told["links"]
    for name, itemsize in {"masters": 4, "moments": 8, "gradients": 2, "parameters": 2}.items():
        of_rank = itemsize * ELEMENTS // (16 if name in spread else 1)
        assert of_rank <= stage[name] <= 1.05 * of_rank, name
    assert link["pinned"] == 8 * stage["offloaded"] and link["most_floor"] > 0
    status, output = run("doctor", of_fsdp(strategy), "--gpus", "16", "--gpus-per-node", "8", "--json")
    found = json.loads(output)["config"]
    assert found["pinned_by_rank"] <= found["state_bytes"][0] == stage["state_bytes"]
    assert 0.95 * link["pinned"] <= found["pinned_by_node"] <= link["pinned"]


def test_where_there_are_no_gpus_a_jobs_node_is_not_taken_to_be_this_machine(no_megatron, of_fsdp):
    of_node = {}
    for more in ((), ("--gpus-per-node", "8")):
        _, output = run("doctor", of_fsdp("optim"), "--gpus", "16", *more)
        of_node[more] = "pinned by a node" in output
    assert of_node == {(): False, ("--gpus-per-node", "8"): True}


def test_doctor_and_plan_say_the_settings_with_the_memory_of_hybrid_device_optimizer_under_megatron_fsdp(
    no_megatron, of_fsdp, tmp_path
):
    path = of_fsdp("optim")
    changed(Path(path), tmp_path, "optimizer_offload_fraction: 0.0", "optimizer_offload_fraction: 0.25")
    changed(Path(path), tmp_path, "optimizer_cpu_offload: false", "optimizer_cpu_offload: true")
    said = "OffloadConfig(fraction=0.25) in place of optimizer.optimizer_offload_fraction=0.25"
    for command_line in ("doctor", "plan"):
        status, output = run(command_line, path, "--json")
        (refusal,) = json.loads(output)["refusals"]
        assert status == 1 and said in refusal and "OffloadConfig.master_weights=False" in refusal
    changed(Path(path), tmp_path, "optimizer_cpu_offload: true", "optimizer_cpu_offload: false")
    for options, itemsize in ((("--fraction", "0.25"), 12), (("--fraction", "0.25", "--no-master-weights"), 8)):
        status, output = run("plan", path, "--json", *options)
        (stage,) = json.loads(output)["stages"]
        assert status == 0 and stage["offloaded"] >= 0.25 * itemsize * ELEMENTS


def test_other_states_than_adams_under_megatron_fsdp_are_not_counted(no_megatron, of_fsdp, tmp_path):
    path = changed(Path(of_fsdp("optim")), tmp_path, "  optimizer: adam", "  optimizer: muon")
    status, output = run("plan", path)
    assert status == 2 and "optimizer.optimizer='muon' with ddp.use_megatron_fsdp=True" in " ".join(output.split())


@pytest.fixture
def builder(monkeypatch):
    """A builder that answers what the test puts here, and the requests that it gets."""
    fake = SimpleNamespace(answer={}, requests=[])

    def answer(arguments, **options):
        fake.requests.append(json.loads(arguments[-1]))
        return SimpleNamespace(returncode=0, stdout=json.dumps(fake.answer))

    monkeypatch.setattr(job_module, "subprocess", SimpleNamespace(run=answer, DEVNULL=None))
    for module in (command, job_module):
        monkeypatch.setattr(module, "missing_packages", list)
    return fake


def test_the_builder_is_asked_once_for_what_is_installed_and_for_the_config(builder, saved):
    of_job = {"flag": True, "refusals": ["no"], "engine": None, "gpus": 4, "gpus_given": True, "bridge_refuses": None}
    of_job["settings"] = {"fraction": 1.0}
    config = plain_config(load_saved_config(saved))
    builder.answer = {"mcore": "0.19.9", "offloader": "generation", "config": config, **of_job}
    options = ["--gpus", "4", "--vocab-size", "8", "--fraction", "1", "--json"]
    status, output = run("doctor", "json:recipe", "a.b=1", *options)
    found = json.loads(output)
    asked = {"target": "json:recipe", "gpus": 4, "vocab_size": 8, "overrides": ["a.b=1"], "offload": {"fraction": 1.0}}
    assert builder.requests == [{**asked, "patches": True}]
    assert status == 1 and found["refusals"] == ["no"] and found["config"]["gpus"] == 4
    assert (found["installed"]["mcore"], found["installed"]["offloader"]) == ("0.19.9", "generation")


def test_a_bridge_that_the_package_does_not_fit_is_refused_whatever_the_config(builder):
    builder.answer = {"install_refuses": "no such function"}
    status, output = run("doctor", "json:recipe", "--json")
    found = json.loads(output)
    assert status == 1 and found["refusals"] == ["no such function"] and found["config"] is None
    assert any("the config was not looked at" in note for note in found["notes"])
    status, output = run("plan", "json:recipe")
    assert status == 2 and "no such function" in output


@pytest.mark.parametrize(
    ("error", "said"),
    [(RuntimeError("no such function"), "no such function"), (ImportError("libc"), "ImportError: libc")],
)
def test_the_builder_tells_a_package_that_does_not_fit_from_a_config_that_cannot_be_built(monkeypatch, error, said):
    def refuse(config):
        raise error

    monkeypatch.setattr("bridge_fgo.install", refuse)
    request = {"target": "json:recipe", "offload": {}, "patches": True}
    assert builder_module.answer(request) == {"install_refuses": said}


def test_every_refusal_is_listed_and_the_status_is_1(no_megatron, saved, tmp_path):
    path = changed(saved, tmp_path, "optimizer_cuda_graph: false", "optimizer_cuda_graph: true")
    text = (tmp_path / "run_config.yaml").read_text()
    (tmp_path / "run_config.yaml").write_text(
        text.replace("optimizer_cpu_offload: false", "optimizer_cpu_offload: true")
    )
    status, output = run("doctor", path, "--json")
    refusals = json.loads(output)["refusals"]
    assert status == 1 and len(refusals) == 2
    assert (
        "optimizer.optimizer_cpu_offload=True" in refusals[0] and "optimizer.optimizer_cuda_graph=True" in refusals[1]
    )
    assert run("plan", path)[0] == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5},
            "OffloadConfig(fraction=0.5) in place of optimizer.optimizer_offload_fraction=0.5",
        ),
        ({"exp_avg_dtype": {"_target_": "torch.uint8", "_call_": False}}, "set optimizer.exp_avg_dtype=torch.bfloat16"),
        (
            {"exp_avg_sq_dtype": {"_target_": "torch.float8_e4m3fn", "_call_": False}},
            "set optimizer.exp_avg_sq_dtype=torch.bfloat16",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_doctor_says_what_to_set_in_place_of_hybrid_device_optimizer_and_of_fp8_moments(
    no_megatron, saved, tmp_path, changes, said
):
    path = tmp_path / "run_config.yaml"
    config = yaml.safe_load(saved.read_text())
    config["optimizer"] |= changes
    path.write_text(yaml.safe_dump(config))
    status, output = run("doctor", str(path), "--json")
    (refusal,) = json.loads(output)["refusals"]
    assert status == 1 and said in refusal


def test_with_the_flag_unset_nothing_is_refused_but_told(no_megatron, saved, tmp_path):
    path = changed(saved, tmp_path, "offload_optimizer_states: true", "offload_optimizer_states: false")
    text = (tmp_path / "run_config.yaml").read_text()
    (tmp_path / "run_config.yaml").write_text(text.replace("optimizer_cuda_graph: false", "optimizer_cuda_graph: true"))
    status, output = run("doctor", path, "--json")
    found = json.loads(output)
    assert status == 0 and found["refusals"] == []
    assert any("with the flag set, refused: optimizer.optimizer_cuda_graph" in note for note in found["notes"])
    assert run("plan", path)[0] == 0


@pytest.fixture
def four_gpus(monkeypatch):
    """A machine of 4 GPUs and 4 GiB of host memory."""
    gpus = [machine.Gpu("test", 80 * GIB, 1)] * 4
    monkeypatch.setattr(command, "look", lambda: machine.Machine(gpus, 1, 8, 4 * GIB, 4 * GIB, None, None))


@pytest.mark.usefixtures("four_gpus")
def test_a_node_without_the_memory_is_refused(no_megatron, saved, monkeypatch):
    assert run("doctor", str(saved), "--no-probe", "--gpus", "8")[0] == 0
    monkeypatch.setattr(command, "pools", lambda: [Pool("host", 2**20, 2**20)])
    status, output = run("doctor", str(saved), "--no-probe", "--gpus", "8", "--json")
    assert status == 1 and "4 rank(s)" in json.loads(output)["refusals"][0]
    _, output = run("doctor", str(saved), "--no-probe", "--gpus", "2", "--json")
    assert "2 rank(s)" in json.loads(output)["refusals"][0], "a smaller job has fewer ranks than the machine GPUs"


def test_megatron_bridge_without_transformer_engine_is_refused_where_there_are_gpus():
    versions = {"transformer-engine": None, "install": None}
    findings = command.Findings(versions, {"gpus": []})
    command._examine_installed(findings)
    assert findings.refusals == [] and "does not import without it" in findings.warnings[0]
    findings = command.Findings(versions, {"gpus": ["one"]})
    command._examine_installed(findings)
    assert findings.warnings == [] and "does not import without it" in findings.refusals[0]


@pytest.mark.usefixtures("four_gpus")
def test_the_memory_of_mcores_offloader_is_warned_of_and_not_refused(no_megatron, saved, monkeypatch):
    # Training does not ask for it there, and would start.
    monkeypatch.setattr(command, "available_bytes", lambda: 2**20)
    status, output = run("doctor", str(saved), "--no-probe", "--gpus", "8", "--engine", "mcore", "--json")
    found = json.loads(output)
    assert status == 0 and found["refusals"] == []
    assert any("mcore's offloader pins" in warning and "4 rank(s)" in warning for warning in found["warnings"])
    own = json.loads(run("doctor", str(saved), "--no-probe", "--gpus", "8", "--json")[1])["config"]
    assert found["config"]["pinned_by_rank"] > own["pinned_by_rank"], "in blocks of powers of two"


@pytest.mark.parametrize("command", ["plan", "doctor"])
def test_what_mcores_offloader_does_not_honour_is_refused_without_megatron_too(no_megatron, saved, command):
    status, output = run(command, str(saved), "--engine", "mcore", "--fraction", "0.5", "--json")
    assert status == 1 and "fraction=0.5: not honoured by engine='mcore'" in json.loads(output)["refusals"][0]


def test_mcores_offloader_copies_masters_whole_also_in_a_plan_without_megatron(no_megatron, saved):
    def seconds(*arguments):
        plan = json.loads(run("plan", str(saved), "--system", "H200", "--json", *arguments)[1])
        return plan["links"][0]["link_seconds"]

    assert seconds("--engine", "mcore") == seconds("--no-master-remainders") > seconds()


@pytest.mark.parametrize("command", ["plan", "doctor"])
def test_a_budget_that_cannot_be_met_is_refused_with_the_least_that_can(no_megatron, saved, command):
    status, output = run(command, str(saved), "--gpu-memory-budget-gib", "0.001", "--json")
    (refusal,) = json.loads(output)["refusals"]
    assert status == 1 and "gpu_memory_budget_gib=0.001" in refusal and "needs about 0." in refusal
    status, output = run(command, str(saved), "--gpu-memory-budget-gib", "70", "--json")
    assert status == 0 and json.loads(output)["refusals"] == []


@pytest.mark.parametrize("command", ["plan", "doctor"])
def test_settings_that_a_saved_config_holds_count(no_megatron, saved, tmp_path, command):
    flag = "\n  offload_optimizer_states: true"
    budget = changed(saved, tmp_path, flag, f"{flag}\n  offload:\n    gpu_memory_budget_gib: 0.001")
    status, output = run(command, budget, "--json")
    assert status == 1 and "gpu_memory_budget_gib=0.001" in json.loads(output)["refusals"][0]
    status, output = run(command, budget, "--gpu-memory-budget-gib", "70")
    assert status == 2 and "optimizer.offload.gpu_memory_budget_gib=0.001 in the run's config" in output
    misspelt = changed(saved, tmp_path, flag, f"{flag}\n  offload:\n    fractoin: 0.5")
    status, output = run(command, misspelt)
    assert status == 2 and "optimizer.offload.fractoin: there is no such setting; did you mean fraction?" in output


@pytest.mark.usefixtures("four_gpus")
def test_the_memory_that_is_pinned_is_of_all_that_may_leave(no_megatron, saved, tmp_path):
    unknown = changed(saved, tmp_path, "\n  cpu_offloading: false", "\n  cpu_offloading: true")
    pinned = [
        json.loads(run("doctor", *arguments, "--no-probe", "--json")[1])["config"]["pinned_by_rank"]
        for arguments in (
            (str(saved),),
            (str(saved), "--gpu-memory-budget-gib", "70"),
            (unknown, "--gpu-memory-budget-gib", "70"),
        )
    ]
    assert pinned[0] == pinned[1] == pinned[2] > 0, "also where activations are not known, and so not what will leave"


@pytest.mark.usefixtures("four_gpus")
def test_nothing_is_refused_for_the_memory_of_fewer_gpus_than_the_job_may_have(no_megatron, saved, monkeypatch):
    monkeypatch.setattr(command, "pools", lambda: [Pool("host", 2**20, 2**20)])
    status, output = run("doctor", str(saved), "--no-probe", "--json")
    found = json.loads(output)
    assert status == 0 and found["refusals"] == []
    note = "on 1 GPUs, the fewest it can have; give --gpus"
    assert note in found["notes"]
    assert any(text.startswith("refused on so few: ") and "host memory" in text for text in found["notes"])
    assert note in json.loads(run("plan", str(saved), "--json")[1])["notes"]
    assert note not in json.loads(run("plan", str(saved), "--json", "--gpus", "1")[1])["notes"]


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(
    ("blocks", "files", "refused"), [(10**6, 10**6, None), (1, 10**6, "/dev/shm"), (10**6, 20, "ulimit -n")]
)
def test_what_a_background_save_has_not_the_room_for_is_refused_as_in_training(
    no_megatron, saved, tmp_path, monkeypatch, blocks, files, refused
):
    from bridge_fgo.bridge import refusals

    text = saved.read_text()
    assert text.count("\n  save: null\n") == text.count("\n  async_save: false\n") == 1
    path = tmp_path / "run_config.yaml"
    path.write_text(text.replace("  save: null", "  save: somewhere").replace("async_save: false", "async_save: true"))
    shared = SimpleNamespace(f_blocks=blocks, f_bavail=blocks, f_frsize=4096)
    monkeypatch.setattr(refusals, "os", SimpleNamespace(statvfs=lambda path: shared))
    monkeypatch.setattr(refusals.resource, "getrlimit", lambda which: (files, files))
    strategy = "file_system" if refused == "/dev/shm" else "file_descriptor"
    monkeypatch.setattr(torch.multiprocessing, "get_sharing_strategy", lambda: strategy)
    status, output = run("doctor", str(path), "--no-probe", "--gpus", "8", "--json")
    found = json.loads(output)["refusals"]
    assert status == (refused is not None)
    assert [(refused in text, "4 rank(s)" in text) for text in found] == [(True, True)] * (refused is not None)


def test_of_a_background_save_the_rank_with_most_tensors_counts_beside_the_one_with_most_bytes(monkeypatch):
    asked = []
    monkeypatch.setattr(command, "refuse_small_shared_memory", lambda checkpoint, copies, ranks: asked.append(copies))
    stages = [[SimpleNamespace(saved=(100,))], [SimpleNamespace(saved=(1,) * 5)]]
    job = SimpleNamespace(config=SimpleNamespace(checkpoint=None))
    assert not list(command._memory_refusals(job, SimpleNamespace(fullest_node=lambda ranks: [0], states=stages), 1))
    assert asked == [[100], [1] * 5]


def test_a_node_is_refused_for_what_its_own_ranks_need(monkeypatch):
    monkeypatch.setattr(command, "refuse_small_shared_memory", lambda *of_save: None)
    states = [[SimpleNamespace(saved=())]]
    job = SimpleNamespace(config=SimpleNamespace(checkpoint=None))
    estimate = object.__new__(Estimate)
    estimate.__dict__.update(pinned=[300, 150, 150, 150, 250, 250], states=states)  # pipeline stages on nodes of 2

    def refusals(ranks, free):
        monkeypatch.setattr(command, "pools", lambda: [Pool("host", 2000, free)])
        return list(command._memory_refusals(job, estimate, ranks))

    assert not refusals(2, 500) and not refusals(6, 1250)
    assert "500 for the 2 rank(s)" in refusals(2, 499)[0]
    assert "1250 for the 6 rank(s)" in refusals(6, 1249)[0]


def test_limits_that_are_too_low_are_warned_of():
    few = machine.Machine([machine.Gpu("test", 80 * GIB, None)], 2, 8, GIB, GIB, 2**16, 2**20)
    found = machine.warnings(few, GIB)
    assert [next(w for w in ("NUMA", "ulimit") if w in text) for text in found] == ["NUMA", "ulimit"]
    enough = machine.Machine([machine.Gpu("test", 80 * GIB, 4)], 2, 8, GIB, GIB, None, 2 * GIB)
    assert machine.warnings(enough, GIB) == []
    assert machine.warnings(replace(enough, gpus=few.gpus, numa_nodes=1), GIB) == []


def test_the_driver_is_read_from_the_kernel(tmp_path, monkeypatch):
    path = tmp_path / "version"
    path.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build\n")
    monkeypatch.setattr(installed, "DRIVER", path)
    assert installed.driver_version() == "570.124.06"


def test_the_words_are_of_what_is_there(no_megatron, saved):
    assert "expert states" not in run("plan", str(saved))[1]
    assert "Nothing is refused by the offload." in run("doctor", str(saved))[1]


def test_every_links_figures_are_printed_with_their_source_and_what_is_not_measured_is_marked(no_megatron, saved):
    output = " ".join(run("plan", str(saved))[1].split())
    for name, link in LINKS.items():
        speeds = f"{link.one_way / 1e9:.0f} / {link.duplex / 1e9:.0f} GB/s"
        assert f"- {name}{'' if link.measured else ' *'}, {speeds}: {link.source}" in output
        assert f"│ {name} {'│' if link.measured else '* │'}" in output
        assert link.measured == (link.source.startswith("measured by")) == ("not measured" not in link.source)
    assert "(*: not measured)" in output
    output = " ".join(run("plan", str(saved), "--system", "GB200", "--link-gbs", "10")[1].split())
    assert "- GB200, 10 / 10 GB/s: --link-gbs" in output and "* │" not in output


def test_plan_prints_one_object_and_draws(no_megatron, saved, tmp_path):
    picture = tmp_path / "plan.png"
    status, output = run("plan", str(saved), "--json", "--system", "H200", "--gpus", "2", "--picture", str(picture))
    found = json.loads(output)
    assert status == 0 and found["parallel"]["data"] == 2 and len(found["links"]) == 1
    (stage,) = found["stages"]
    assert stage["state_bytes"] - stage["least_state_bytes"] < 12 * 128 + stage["state_bytes"] // 100
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_each_figure_of_a_plan_is_below_its_heading(no_megatron, saved, monkeypatch):
    monkeypatch.setattr(report, "gigabytes", str)  # of a small model all are 0.00
    monkeypatch.setattr(report, "GRID", 1)
    monkeypatch.setenv("COLUMNS", "200")
    (stage,) = json.loads(run("plan", str(saved), "--json")[1])["stages"]
    lines = [
        [cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in run("plan", str(saved))[1].splitlines()
    ]
    heads = next(line for line in lines if line[:1] == ["stage"])
    shown = dict(zip(heads, lines[lines.index(heads) + 2], strict=True))
    keys = (
        "parameters",
        "gradients",
        "masters",
        "moments",
        "activations",
        "workspaces",
        "peak_resident",
        "peak_offloaded",
        "offloaded",
    )
    assert list(shown.values()) == [str(stage[key]) for key in ("stage", *keys)]
    assert int(shown["peak"]) > int(shown["offloaded"])
    parts = ("params", "grads", "masters", "moments", "activ.", "other")
    assert int(shown["peak"]) == sum(int(shown[name]) for name in parts)
    assert int(shown["peak"]) == int(shown["offloaded"]) + int(shown["on host"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--system", "A100"], "--system A100"),
        (["--link-gbs", "0"], "--link-gbs"),
        (["--link-gbs", "nan"], "--link-gbs nan"),
        (["--link-gbs", "inf"], "--link-gbs inf"),
        (["--check"], "--check needs --system"),
        (["--activations-gb", "-1"], "--activations-gb"),
        (["--forward-seconds", "nan"], "--forward-seconds nan"),
        (["--picture", "/nonexistent/x.png"], "/nonexistent/x.png"),
        (["--backward-seconds", "1"], "--forward-seconds"),
        (["--fraction", "2"], "OffloadConfig.fraction"),
        (["--gpus", "0"], "--gpus"),
    ],
)
def test_a_users_mistake_is_named(no_megatron, saved, arguments, message):
    status, output = run("plan", str(saved), *arguments)
    assert status == 2 and message in output


@pytest.mark.parametrize("size", ["0", "null", "-2", "1.5"])
@pytest.mark.parametrize("command", ["plan", "doctor"])
def test_a_parallel_size_that_is_none_is_named(no_megatron, saved, tmp_path, command, size):
    path = changed(saved, tmp_path, "\n  context_parallel_size: 1\n", f"\n  context_parallel_size: {size}\n")
    status, output = run(command, str(path))
    assert status == 2 and "model.context_parallel_size=" in output


def test_fp8_parameters_are_not_taken_for_16_bit_ones(no_megatron, saved, tmp_path):
    status, output = run("plan", changed(saved, tmp_path, "fp8_param_gather: false", "fp8_param_gather: true"))
    assert status == 2 and "ddp.fp8_param_gather=True" in output


@pytest.mark.parametrize("command", ["plan", "doctor"])
@pytest.mark.parametrize("name", ["bf16_with_mxfp8_mixed", "bf16_mixed"])
def test_a_mixed_precision_that_is_a_name_is_not_taken_for_what_the_sections_say(
    no_megatron, saved, tmp_path, command, name
):
    path = changed(saved, tmp_path, "mixed_precision: null", f"mixed_precision: {name}")
    status, output = run(command, path)
    assert status == 2 and f"mixed_precision='{name}': what it stands for" in output and "install" in output


@pytest.mark.parametrize("name", ["fp16_mixed", "bf16_with_fp8_subchannel_scaling_mixed"])
def test_a_config_that_was_saved_before_training_reads_as_one_saved_in_it(cpu_standins, tmp_path, name):
    from megatron.bridge.training.mixed_precision import get_mixed_precision_config

    from bridge_fgo.tools.arms.cpu_model import CpuOptions, make_config

    config = make_config(CpuOptions(offload=False))
    config.model.transformer_layer_spec, config.mixed_precision = None, get_mixed_precision_config(name)
    config.mixed_precision.grad_reduce_in_fp32 = not config.ddp.grad_reduce_in_fp32
    read = []
    for moment in ("before", "in training"):
        config.to_yaml(str(tmp_path / "run_config.yaml"))
        read.append(load_saved_config(tmp_path / "run_config.yaml"))
        if moment == "before":
            config.mixed_precision.finalize()
            config.mixed_precision.setup(config.model, config.optimizer, config.ddp)
    before, after = ({name: vars(getattr(of, name)) for name in ("model", "optimizer", "ddp")} for of in read)
    assert before == after
    assert before["model"]["_target_"].endswith("GPTModelProvider")


def test_fp8_parameters_of_the_mixed_precision_are_told_where_the_sections_do_not_say_so(no_megatron, saved, tmp_path):
    mixed = "mixed_precision:\n  _target_: megatron.bridge.training.mixed_precision.MixedPrecisionConfig\n"
    path = changed(saved, tmp_path, "mixed_precision: null\n", f"{mixed}  fp8_param_gather: true\n")
    status, output = run("plan", path)
    assert status == 2 and "mixed_precision.fp8_param_gather=True" in output


@pytest.mark.parametrize("command", ["plan", "doctor"])
def test_overrides_are_read_by_bridge_alone(no_megatron, saved, command):
    status, output = run(command, str(saved), "train.micro_batch_size=3")
    assert status == 2 and "train.micro_batch_size=3: Megatron-Bridge reads overrides" in output


def test_a_recipe_without_megatron_says_what_is_missing(no_megatron):
    status, output = run("plan", "llama3_8b_pretrain_config")
    assert status == 2 and "megatron-bridge" in output and "run_config.yaml" in output


@pytest.mark.parametrize("command", ["plan", "doctor"])
def test_a_recipe_of_this_project_needs_no_megatron(no_megatron, command):
    status, output = run(command, "llama3_70b_64gpu", "--json")
    assert status == 0
    told = json.loads(output)
    assert (told["config"] if command == "doctor" else told)["source"].endswith("0.6.2, megatron-core 0.19.2)")


@pytest.mark.parametrize("implementation", ["none", "local", "transformer_engine", "full_iteration"])
@pytest.mark.parametrize("modules", [None, "attn,full_iteration", ["CudaGraphScope.full_iteration"], ["attn"], "full"])
def test_full_iteration_graphs_are_told_as_bridge_does(cpu_standins, implementation, modules):
    from megatron.bridge.utils.cuda_graph import is_full_iteration_cuda_graph

    from bridge_fgo.bridge.refusals import captures_full_iteration

    for name in ("cuda_graph_modules", "cuda_graph_scope"):
        config = SimpleNamespace(cuda_graph_impl=implementation, **{name: modules})
        assert captures_full_iteration(config) == is_full_iteration_cuda_graph(config)
