"""`bridge-fgo doctor` and `plan`: what they count, say and refuse of a job that the builder tells of."""

import copy
import itertools
import json
import os
import re
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from cli import cells, invoke, run, told
from late_disk import require_direct_files

from bridge_fgo.bridge import compat
from bridge_fgo.memory import slab_file
from bridge_fgo.memory.host_memory import Pool
from bridge_fgo.tools import doctor
from bridge_fgo.tools import link as link_module
from bridge_fgo.tools.job import answers, kept_files, target
from bridge_fgo.tools.job import builder as builder_module
from bridge_fgo.tools.job import job as job_module
from bridge_fgo.tools.job.job import sections_of
from bridge_fgo.tools.job.parallel import SIZES, parallel_of
from bridge_fgo.tools.plan import command as plan_command
from bridge_fgo.tools.plan import estimate as plan_estimate
from bridge_fgo.tools.plan import report
from bridge_fgo.tools.plan.estimate import Estimate
from bridge_fgo.tools.plan.systems import SYSTEMS

GIB = 2**30
FSDP = dict.fromkeys(("dist__use_megatron_fsdp", "ddp__use_megatron_fsdp"), True)
FSDP |= {"ddp__data_parallel_sharding_strategy": "optim"}
of_both = pytest.mark.parametrize("name", ["plan", "doctor"])
ON_NODE = ("--no-probe", "--gpus", 8)
TINY = kept_files.read(answers.FOLDER / "tiny.json.gz")
"""The kept answer and its versions: a GPT of 4 layers with the flag set."""


class Builder:
    """Answers for a job that is `tiny` with other settings, as the builder does; `answer`: instead of that."""

    def __init__(self) -> None:
        self.changes: dict = {}
        self.answer: dict | None = None
        self.requests: list[dict] = []

    def __call__(self, arguments, **options):
        self.requests.append(json.loads(arguments[-1]))
        found = self._made(self.requests[-1]) if self.answer is None else self.answer
        return SimpleNamespace(returncode=0, stdout=json.dumps(found))

    def _made(self, request):
        found = copy.deepcopy(TINY["answer"])
        found["config"]["train"]["global_batch_size"] *= request["gpus"] or 1  # which is `tiny`'s, of one
        for name, value in self.changes.items():
            section, _, setting = name.partition("__")
            found["config"][section][setting] = value
        config = sections_of(found["config"])
        try:
            gpus = parallel_of(config, request["gpus"]).gpus
            found |= builder_module.offload_of(config, request["offload"])
        except ValueError as error:
            return {"error": str(error)}
        found |= {"gpus": gpus, "gpus_given": request["gpus"] is not None}
        for held in found["held"]:
            held["ranks"] *= gpus  # all as the one
            held["optimizers"][0]["bundles"].append([0, 1000])  # no power of two
        return found


@pytest.fixture
def builder(monkeypatch, cpu_standins):
    """What `plan` and `doctor` ask of jobs; training here is not asked for, and mcore has an offloader."""
    fake = Builder()
    monkeypatch.setattr(answers, "subprocess", SimpleNamespace(run=fake, DEVNULL=None))
    monkeypatch.setattr(doctor, "lacking", lambda findings: "")
    monkeypatch.setattr(compat, "upstream_generation", lambda: "mcore generation 1")
    monkeypatch.setattr(compat, "upstream_adam_is_fused", lambda: True)
    return fake


@pytest.fixture
def config(builder):
    """Returns a function that names a job with other settings than `tiny`, each as `section__setting`."""

    def named(**changes):
        builder.changes = changes
        return "json:recipe"

    return named


def are_missing(monkeypatch, *packages):
    for module in (doctor, job_module):
        monkeypatch.setattr(module, "missing_packages", lambda: list(packages))


@pytest.fixture
def no_megatron(monkeypatch):
    """Megatron cannot be found, and training here is not asked for."""
    are_missing(monkeypatch, "megatron-bridge", "megatron-core")
    monkeypatch.setattr(answers, "installed_versions", dict)
    monkeypatch.setattr(doctor, "lacking", lambda findings: "")


@pytest.fixture
def four_gpus(monkeypatch):
    """A machine of 4 GPUs and 4 GiB of host memory; returns a function that says how much of it is free."""
    monkeypatch.setattr(doctor, "_examine_installed", lambda findings: None)  # no Transformer Engine is here
    gpus = [doctor.Gpu("test", 80 * GIB, 1)] * 4
    monkeypatch.setattr(doctor, "look", lambda: doctor.Machine(gpus, 1, 8, 4 * GIB, 4 * GIB, None, None))
    return lambda free: monkeypatch.setattr(doctor, "pools", lambda: [Pool("host", free, free)])


@pytest.mark.parametrize(("name", "where"), [("doctor", (doctor, "look")), ("plan", (plan_command, "read_job"))])
def test_a_gpu_that_cannot_be_used_is_one_line_and_status_2(monkeypatch, config, name, where):
    monkeypatch.setattr(*where, Mock(side_effect=RuntimeError("the NVIDIA driver is too old")))
    assert run(name, config()) == (2, f"bridge-fgo {name}: the NVIDIA driver is too old")


# --- mistakes: status 2, and what is wrong ---

BUDGET = {"optimizer__offload": {"gpu_memory_budget_gib": 0.001}}
GRADIENTS = {"optimizer__offload": {"gradients": True}, "ddp__overlap_grad_reduce": True}


@pytest.mark.parametrize(
    ("names", "changes", "options", "said"),
    [
        *(
            ("plan doctor", {name.replace(".", "__"): size}, "", f"{name}={size!r}: use a whole number of at least 1")
            for name, size in zip(SIZES, itertools.cycle((0, -2)))
        ),
        *(("plan", {"model__context_parallel_size": size}, "", "model.context_parallel_size=") for size in (None, 1.5)),
        ("plan", {"optimizer__optimizer": "sgd"}, "", "optimizer.optimizer='sgd': the plan knows"),
        ("plan", FSDP | {"optimizer__optimizer": "muon"}, "",
         "optimizer.optimizer='muon' with ddp.use_megatron_fsdp=True"),
        ("plan doctor", BUDGET, "--gpu-memory-budget-gib 70",
         "optimizer.offload.gpu_memory_budget_gib=0.001 in the run's config"),
        ("plan", {}, "--link-gbs nan", "--link-gbs nan"),
        ("plan", {}, "--activations-gb -1", "--activations-gb"),
        ("plan", {}, "--forward-seconds nan", "--forward-seconds nan"),
        ("plan doctor", {}, "train.micro_batch_size 2", "write SECTION.FIELD=VALUE, here train.micro_batch_size=2"),
    ],
)  # fmt: skip
def test_a_users_mistake_is_named(config, names, changes, options, said):
    path = config(**changes)
    for name in names.split():
        status, output = run(name, path, *options.split())
        assert status == 2 and said in output


@of_both
@pytest.mark.parametrize("job", ["run_config.yaml", "llama3_70b_pretrain_config", "tiny train.micro_batch_size=3"])
def test_what_needs_megatron_says_what_to_install(no_megatron, monkeypatch, tmp_path, name, job):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(target, "config_functions", dict)
    (tmp_path / "run_config.yaml").write_text("_target_: ConfigContainer")
    status, output = run(name, *job.split())
    assert status == 2 and f"{job}: megatron-bridge and megatron-core are not installed" in output
    assert "pip install 'megatron-bridge>=0.6,<0.7' (no GPU is needed)" in output


# --- refusals: status 1, each of them ---


@pytest.mark.parametrize(
    ("changes", "options", "refused"),
    [
        ({}, "--engine mcore --fraction 0.5", ["fraction=0.5: not honoured by engine='mcore'"]),
        ({}, "--gpu-memory-budget-gib 70", []),
        ({}, "--gpu-memory-budget-gib 0.001", ["gpu_memory_budget_gib=0.001.*needs about 0\\."]),
        (BUDGET, "", ["gpu_memory_budget_gib=0.001"]),
        (GRADIENTS, "--engine mcore", ["gradients=True: not honoured by engine='mcore'"]),
        ({"optimizer__optimizer_cuda_graph": True, "optimizer__optimizer_cpu_offload": True}, "",
         ["optimizer.optimizer_cpu_offload=True", "optimizer.optimizer_cuda_graph=True"]),
    ],
)  # fmt: skip
def test_every_refusal_is_listed_and_the_status_is_1(config, changes, options, refused):
    path = config(**changes)
    for name in ("plan", "doctor"):
        status, found = told(name, path, *options.split())
        assert status == bool(refused) and len(found["refusals"]) == len(refused)
        assert all(re.search(why, text) for why, text in zip(refused, found["refusals"], strict=True))


def test_with_the_flag_unset_nothing_is_refused_but_told_and_a_node_without_gpus_is_not_the_jobs(config):
    path = config(optimizer__offload_optimizer_states=False, optimizer__optimizer_cuda_graph=True)
    status, found = told("doctor", path)
    assert status == 0 and found["refusals"] == []
    assert any("with the flag set, refused: optimizer.optimizer_cuda_graph" in note for note in found["notes"])
    assert run("plan", path)[0] == 0
    for more in ((), ("--gpus-per-node", "8")):
        assert ("pinned by a node" in run("doctor", config(**FSDP), "--gpus", "16", *more)[1]) is bool(more)


# --- bytes ---


OFFLOADS_HALF = {
    "model__fine_grained_activation_offloading": True,
    "model__offload_modules": ["core_attn"],
    "model__activation_offload_fraction": 0.5,
}
"""Of the activations, whose bytes are not counted."""


def test_survive_crash_takes_twice_the_host_memory_and_six_times_with_a_buddy(config, four_gpus):
    once, twice, six_times = (
        told("doctor", config(), "--no-probe", *options)[1]["config"]["pinned_by_rank"]
        for options in ([], ["--survive-crash"], ["--survive-crash", "--copies-to-buddy-every", "9"])
    )
    assert six_times == 3 * twice == 6 * once > 0


def test_what_the_host_has_no_room_for_is_in_files_whose_folder_is_examined(config, four_gpus, tmp_path, monkeypatch):
    require_direct_files(tmp_path)
    monkeypatch.setattr(slab_file, "BUFFERS", 1)
    monkeypatch.setattr(plan_estimate, "DISK_RATES", (0.001,))
    asked = "doctor", config(), "--no-probe"
    whole = told(*asked)[1]["config"]["pinned_by_node"]

    def in_folder(folder):
        limit = str(0.7 * whole / 2**30)
        _, found = told(*asked, "--host-memory-gib", limit, "--nvme-folder", str(folder))
        return found["config"]["pinned_by_node"], " ".join(found["notes"]), " ".join(found["refusals"])

    pinned, notes, refusals = in_folder(tmp_path)
    assert 0 < pinned <= 0.7 * whole and refusals == ""
    assert "a node, which each step reads and writes (" in notes
    of_node, seconds = re.search(r"([\d.]+) MiB a node.* waits ([\d.]+) s .* of reads and writes", notes).groups()
    assert float(seconds) == pytest.approx(2 * float(of_node) * 2**20 / 1e6, rel=0.01)
    assert "a tmpfs is memory of the host" in in_folder("/dev/shm")[2]


def test_wear_is_told_by_the_drives_under_partitions_and_lvm_and_warned_of_above_1(tmp_path, monkeypatch):
    device = os.stat(tmp_path).st_dev
    volume = tmp_path / f"{os.major(device)}:{os.minor(device)}" / "slaves"
    volume.mkdir(parents=True)
    for drive in ("sda", "sdb"):
        partition = tmp_path / drive / f"{drive}1"
        partition.mkdir(parents=True)
        (partition / "partition").write_text("1")
        (tmp_path / drive / "size").write_text(f"{10**9}\n")
        (volume / partition.name).symlink_to(partition)
    monkeypatch.setattr(doctor, "BLOCK_DEVICES", tmp_path)
    found = doctor.Findings({}, {})
    for written in (10**9, 2 * 10**8):
        doctor._examine_wear(found, str(tmp_path), written)
    told = [lines[0].split(": ")[1].split(";")[0] for lines in (found.warnings, found.notes) if len(lines) == 1]
    assert told == [f"a step a minute writes the drive's 1.02 TB {times} times a day" for times in ("1.4", "0.28")]


def test_the_memory_that_is_pinned_is_of_all_that_may_leave_and_mcores_copies_are_of_whole_masters(config, four_gpus):
    """Also where activations are not known, and so not what will leave."""
    pinned = {
        told("doctor", config(**changes), "--no-probe", *options)[1]["config"]["pinned_by_rank"]
        for changes in ({}, OFFLOADS_HALF)
        for options in ((), ("--gpu-memory-budget-gib", "70"))
    }
    assert len(pinned) == 1 and 0 not in pinned

    def seconds(*arguments):
        return told("plan", config(), "--system", "H200", *arguments)[1]["links"][0]["link_seconds"]

    assert seconds("--engine", "mcore") == seconds() > seconds("--master-remainders")


@of_both
@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (OFFLOADS_HALF, "and pins bytes that are not known (activations are not counted with model.fine_grained_"),
        (
            {"model__moe_paged_stash": True, "model__moe_paged_stash_buffer_size_factor_cpu": -0.8},
            "model.moe_paged_stash_buffer_size_factor_cpu=-0.8: mcore pins host memory for activations of experts",
        ),
        ({"model__moe_paged_stash": True, "model__moe_paged_stash_buffer_size_factor_cpu": 0.0}, ""),
        ({"model__moe_paged_stash_buffer_size_factor_cpu": 1.0}, ""),
    ],
)
def test_host_memory_that_others_pin_and_is_not_counted_is_named(config, name, flag, changes, said):
    _, found = told(name, config(optimizer__offload_optimizer_states=flag, **changes))
    assert [said in note for note in found["notes"] if " pins " in note] == [True] * bool(said)


# --- this machine's memory ---


def test_a_node_without_the_memory_is_refused_unless_the_job_may_have_more_gpus(config, four_gpus):
    assert run("doctor", config(), *ON_NODE)[0] == 0
    four_gpus(2**20)
    for gpus, ranks in (("8", 4), ("2", 2)):  # a smaller job has fewer ranks than the machine GPUs
        status, found = told("doctor", config(), "--no-probe", "--gpus", gpus)
        assert status == 1 and f"{ranks} rank(s)" in found["refusals"][0]

    four_gpus(2**20)
    status, found = told("doctor", config(), "--no-probe")
    assert status == 0 and found["refusals"] == []
    note = "on 1 GPUs, the fewest it can have; give --gpus"
    assert note in found["notes"]
    assert any(text.startswith("refused on so few: ") and "host memory" in text for text in found["notes"])
    assert note in told("plan", config())[1]["notes"]
    assert note not in told("plan", config(), "--gpus", "1")[1]["notes"]


def test_the_memory_of_mcores_offloader_is_warned_of_and_not_refused(config, four_gpus, monkeypatch):
    # Training does not ask for it there, and would start.
    monkeypatch.setattr(doctor, "available_bytes", lambda: 2**20)
    status, found = told("doctor", config(), *ON_NODE, "--engine", "mcore")
    assert status == 0 and found["refusals"] == []
    assert any("mcore's offloader pins" in warning and "4 rank(s)" in warning for warning in found["warnings"])
    own = told("doctor", config(), *ON_NODE)[1]["config"]
    assert found["config"]["pinned_by_rank"] > own["pinned_by_rank"], "in blocks of powers of two"


JOB = SimpleNamespace(config=SimpleNamespace(checkpoint=None))


@pytest.mark.parametrize("fullest", [[100], [1] * 5])
def test_of_a_background_save_the_ranks_with_most_tensors_and_most_bytes_count(monkeypatch, fullest):
    def refuse(checkpoint, copies, ranks):
        if copies == fullest:
            raise ValueError(f"{copies} of {ranks} rank(s)")

    monkeypatch.setattr(doctor, "refuse_small_shared_memory", refuse)
    stages = [[SimpleNamespace(saved=(100,))], [SimpleNamespace(saved=(1,) * 5)]]
    found = doctor._memory_refusals(JOB, SimpleNamespace(pinned=[0], states=stages), 4)
    assert list(found) == [f"{fullest} of 4 rank(s)"]


@pytest.mark.parametrize(("ranks", "needed"), [(2, 500), (6, 1250)])
def test_a_node_is_refused_for_what_its_own_ranks_need(monkeypatch, four_gpus, ranks, needed):
    monkeypatch.setattr(doctor, "refuse_small_shared_memory", lambda *of_save: None)
    estimate = object.__new__(Estimate)
    pinned = [300, 150, 150, 150, 250, 250]  # pipeline stages on nodes of 2
    estimate.__dict__.update(pinned=pinned, states=[[SimpleNamespace(saved=())]])
    for free, refused in ((needed, 0), (needed - 1, 1)):
        monkeypatch.setattr(doctor, "pools", lambda free=free: [Pool("host", 2000, free)])
        refusals = list(doctor._memory_refusals(JOB, estimate, ranks))
        assert [f"{needed} for the {ranks} rank(s)" in text for text in refusals] == [True] * refused


def test_limits_that_are_too_low_are_warned_of_and_the_one_on_page_locked_memory_is_judged():
    few = doctor.Machine([doctor.Gpu("test", 80 * GIB, None)], 2, 8, GIB, GIB, 2**16, 2**20)
    found = doctor.warnings(few, GIB)
    assert [next(w for w in ("NUMA", "ulimit") if w in text) for text in found] == ["NUMA", "ulimit"]
    enough = doctor.Machine([doctor.Gpu("test", 80 * GIB, 4)], 2, 8, GIB, GIB, None, 2 * GIB)
    assert doctor.warnings(enough, GIB) == []
    assert doctor.warnings(replace(enough, gpus=few.gpus, numa_nodes=1), GIB) == []
    judged = {
        (None, 10**9): "unlimited: enough",
        (10**9, 10**8): "1.00 GB: enough",
        (10**6, 10**9): "1.00 MB: less than the 1.00 GB that a rank pins",
        (10**6, None): "1.00 MB: name a config to have it judged",
    }
    assert {lockable_and_pinned: doctor._judged(*lockable_and_pinned) for lockable_and_pinned in judged} == judged


# --- what is installed, and whether this machine can train ---


def test_without_megatron_and_a_config_doctor_works_and_settings_of_a_job_are_an_error(no_megatron):
    status, found = told("doctor")
    assert status == 0 and found["refusals"] == []
    assert found["installed"]["torch"] == torch.__version__ and found["installed"]["mcore"] is None
    assert any("megatron-bridge" in note for note in found["notes"])
    status, output = run("doctor", "--gpus", "64", "--fraction", "0.5")
    assert status == 2 and "gpus=64, fraction=0.5: of a job, and none is named" in output


@pytest.mark.parametrize(
    ("missing", "gpus", "target", "reason"),
    [
        (["megatron-bridge"], [1], None, "megatron-bridge is not installed"),
        ([], [], None, "torch sees no GPU"),
        ([], [], "tiny", ""),
        ([], [1], None, ""),
    ],
)
def test_what_keeps_a_machine_from_training_is_status_1_beside_its_facts(monkeypatch, missing, gpus, target, reason):
    are_missing(monkeypatch, *missing)
    said = doctor.lacking(SimpleNamespace(machine={"gpus": gpus}, target=target))
    assert said.startswith(reason) and bool(said) == bool(reason)
    if missing:
        status, found = told("doctor", "--no-probe")
        assert status == 1 and found["verdict"].startswith(f"Cannot train here: {reason}")
        assert found["machine"]["host_bytes"] > 0


@pytest.mark.parametrize("gpus", [[], ["one"]])
def test_megatron_bridge_without_transformer_engine_is_refused_if_there_are_gpus(gpus, tmp_path, monkeypatch):
    findings = doctor.Findings({"transformer-engine": None, "install": None}, {"gpus": gpus})
    doctor._examine_installed(findings)
    told, not_told = (findings.refusals, findings.warnings) if gpus else (findings.warnings, findings.refusals)
    assert not_told == [] and "does not import without it" in told[0]
    path = tmp_path / "version"
    path.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build\n")
    monkeypatch.setattr(doctor, "DRIVER", path)
    assert doctor.driver_version() == "570.124.06"


# --- the builder ---


def test_the_builder_is_asked_once_for_what_is_installed_and_for_the_config(builder, config):
    config(optimizer__optimizer_cuda_graph=True)
    options = ["--gpus", "4", "--vocab-size", "8", "--fraction", "1"]
    status, found = told("doctor", "json:recipe", "a.b=1", *options)
    asked = {"target": "json:recipe", "gpus": 4, "vocab_size": 8, "overrides": ["a.b=1"], "offload": {"fraction": 1.0}}
    assert builder.requests == [{**asked, "patches": True}]
    assert status == 1 and len(found["refusals"]) == 1 and found["config"]["gpus"] == 4
    assert found["installed"]["mcore"] == TINY["answer"]["mcore"]


def test_without_a_config_the_builder_is_asked_only_of_versions_that_no_answers_are_kept_of(builder, monkeypatch):
    fresh = []
    monkeypatch.setattr(doctor, "ask_builder", lambda **asked: fresh.append(asked) or {"mcore": "0.20.0"})
    versions = TINY["versions"]
    for installed, mcore in ((versions, versions["megatron-core"]), ({"megatron-core": "0.20.0"}, "0.20.0")):
        monkeypatch.setattr(answers, "installed_versions", lambda installed=installed: installed)
        _, found = told("doctor")
        assert found["installed"]["mcore"] == mcore
        assert any("was not imported" in note for note in found["notes"]) == (not fresh)
    assert len(fresh) == 1


def test_a_bridge_that_does_not_fit_is_refused_and_a_config_that_cannot_be_built_is_status_2(builder):
    builder.answer = {"install_refuses": "no such function"}
    status, found = told("doctor", "json:recipe")
    assert status == 1 and found["refusals"] == ["no such function"] and found["config"] is None
    assert any("the config was not looked at" in note for note in found["notes"])
    status, output = run("plan", "json:recipe")
    assert status == 2 and "no such function" in output
    builder.answer = {"mcore": "0.19.2", "error": "needs the dev branch"}
    done = invoke("doctor", "dsv4_flash_64gpu", "--no-probe", "--json")
    found = json.loads(done.stdout)
    assert (done.exit_code, done.stderr) == (2, "bridge-fgo doctor: needs the dev branch\n")
    assert found["verdict"] == "Cannot train here: needs the dev branch" and found["machine"]["host_bytes"] > 0


@pytest.mark.parametrize(
    ("error", "said"),
    [(RuntimeError("no such function"), "no such function"), (ImportError("libc"), "ImportError: libc")],
)
def test_the_builder_tells_a_package_that_does_not_fit_from_a_config_that_does_not(monkeypatch, error, said):
    monkeypatch.setattr("bridge_fgo.install", Mock(side_effect=error))
    request = {"target": "json:recipe", "offload": {}, "patches": True}
    assert builder_module.answer(request) == {"install_refuses": said}


# --- what is printed ---


def test_every_links_figures_have_their_source_and_a_mark_if_they_are_not_measured(config):
    assert "expert states" not in run("plan", config())[1]
    assert "Nothing is refused by the offload." in run("doctor", config())[1]

    output = run("plan", config())[1]
    for link in (system.link for system in SYSTEMS.values()):
        assert f"- {link.title}, {link.figures} GB/s: {link.source}" in output
        assert f"│{link.title}│" in output.replace(" │", "│")
        assert link.measured == (link.source.startswith("measured by")) == ("not measured" not in link.source)
    assert "(*: not measured here)" in output
    output = run("plan", config(), "--system", "GB200", "--link-gbs", "10")[1]
    assert "- GB200, 10/10/10 GB/s: --link-gbs" in output and "*│" not in output


def test_each_figure_of_a_plan_is_below_its_heading(config, monkeypatch):
    monkeypatch.setattr(report, "gigabytes", str)  # of a small model all are 0.00
    monkeypatch.setattr(report, "GRID", 1)
    monkeypatch.setenv("COLUMNS", "200")
    (stage,) = told("plan", config())[1]["stages"]
    rows = cells(invoke("plan", config()).output)
    heads = next(row for row in rows if row[0] == "stage")
    shown = dict(zip(heads, rows[rows.index(heads) + 1], strict=True))
    parts = ["parameters", "gradients", "masters", "moments", "activations", "workspaces"]
    keys = ["stage", *parts, "peak_resident", "peak_offloaded", "offloaded"]
    assert list(shown.values()) == [str(stage[key]) for key in keys]
    assert stage["peak_resident"] == sum(stage[name] for name in parts)
    assert int(shown["peak"]) == int(shown["offloaded"]) + int(shown["on host"]) > int(shown["offloaded"])


@pytest.mark.parametrize("implementation", ["none", "local", "transformer_engine", "full_iteration"])
@pytest.mark.parametrize("modules", [None, "attn,full_iteration", ["CudaGraphScope.full_iteration"], ["attn"], "full"])
def test_full_iteration_graphs_are_told_as_bridge_does(cpu_standins, implementation, modules):
    from megatron.bridge.utils.cuda_graph import is_full_iteration_cuda_graph

    from bridge_fgo.bridge.refusals import captures_full_iteration

    for name in ("cuda_graph_modules", "cuda_graph_scope"):
        config = SimpleNamespace(cuda_graph_impl=implementation, **{name: modules})
        assert captures_full_iteration(config) == is_full_iteration_cuda_graph(config)


@pytest.mark.parametrize(
    ("script", "why"),
    [("print('{\"d2h\": 1.0}', flush=True); exit(3)", "status 3"), ("pass", "status 0")],
    ids=["it failed", "it said nothing"],
)
def test_a_link_probe_that_fails_gives_no_figures(monkeypatch, script, why):
    monkeypatch.setattr(link_module, "launcher", lambda gpus: ("-c", script))  # before "-m" and the probe's module
    with pytest.raises(ChildProcessError, match=why):
        link_module.probe(1)
