"""`install(frameworks=...)`: verl, SkyRL and NeMo-RL move memory by a Residency.

The frameworks are modules with their functions' names and parameters, which note that they were called.
"""

import datetime
import functools
import gc
import importlib
import re
import subprocess
import sys
import weakref
from types import SimpleNamespace

import both
import children
import pytest
import rank_child
import torch
from sleeping import buffers, frozen, gone
from spies import note

import bridge_fgo
from bridge_fgo.bridge import framework_moves, framework_names, installation
from bridge_fgo.sleep.moved import LEAST_KEPT_BYTES

pytestmark = pytest.mark.usefixtures("cpu_standins", "poisoned")

UTILS, ENGINE = framework_names.VERL
(STRATEGY,) = framework_names.SKYRL
POLICY, VALUE = framework_names.NEMO_RL

MOVES = """
    def move_model(self, model, device, move_params=True, move_grads=True):
        CALLS.append("move_model")
        return model

    def move_optimizer(self, device):
        CALLS.append("move_optimizer")
"""
SOURCES = {
    UTILS: """
CALLS = []
def offload_megatron_model_to_cpu(models):
    CALLS.append("offload_model")
def load_megatron_model_to_gpu(models, load_grad=True, load_frozen_params=True):
    CALLS.append("load_model")
def offload_megatron_optimizer(optimizers):
    CALLS.append("offload_optimizer")
def load_megatron_optimizer(optimizers):
    CALLS.append("load_optimizer")
def copy_megatron_model_to_cpu(models):
    CALLS.append("copy")
    return [p.detach().clone() for model in models for p in model.parameters()]
def restore_megatron_model_from_cpu(models, cpu_state):
    CALLS.append("restore")
    for p, kept in zip((p for model in models for p in model.parameters()), cpu_state):
        p.data.copy_(kept)
def get_megatron_module_device(models):
    buffers = models[0].buffers  # a stage in which nothing trains has none
    return "cpu" if buffers and not buffers[0].param_data.untyped_storage().nbytes() else "cuda"
""",
    ENGINE: f"""
from {UTILS} import *
from {UTILS} import CALLS
class MegatronEngine:
    _is_offload_param = False
    def save_checkpoint(self, local_path, hdfs_path=None, global_step=0, max_ckpt_to_keep=None, **kwargs):
        if self._is_offload_param or get_megatron_module_device(self.module) == "cpu":
            load_megatron_model_to_gpu(self.module, load_grad=True)
        self.saved = [p.detach().clone() for model in self.module for p in model.parameters()]
        if self._is_offload_param:
            offload_megatron_model_to_cpu(self.module)
    def to(self, device, model=True, optimizer=True, grad=True):
        CALLS.append("to")
        if model:
            offload_megatron_model_to_cpu(self.module) if device == "cpu" else load_megatron_model_to_gpu(self.module)
        if optimizer:
            move = offload_megatron_optimizer if device == "cpu" else load_megatron_optimizer
            move(self.optimizer)
""",
    STRATEGY: """
CALLS = []
class MegatronStrategy:
    def offload_to_cpu(self, model, optimizer, offload_optimizer=True, offload_model=True):
        CALLS.append("offload_to_cpu")
    def backload_to_gpu(self, model, optimizer, backload_optimizer=True, backload_model=True):
        CALLS.append("backload_to_gpu")
""",
    POLICY: f"""
CALLS = []
class MegatronPolicyWorkerImpl:
    optimizer_cpu_offload, offload_optimizer_for_refit = False, True
    def finalize_async_save(self):
        pass
    def offload_before_refit(self):
        CALLS.append("offload_before_refit")
        self.model = self.move_model(self.model, "cpu", move_params=False)
        self.move_optimizer("cpu")
    def offload_after_refit(self):
        CALLS.append("offload_after_refit")
        self.model = self.move_model(self.model, "cpu")
        self.offload_before_refit()
    def prepare_for_training(self, *args, **kwargs):
        CALLS.append("prepare_for_training")
        self.model = self.move_model(self.model, "cuda", move_grads=True, move_params=True)
        self.move_optimizer("cuda")
{MOVES}""",
    VALUE: f"CALLS = []\nclass MegatronValueWorkerImpl:\n{MOVES}",
}  # fmt: skip


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """A function that writes the stand-ins, with texts replaced in them; they are imported on use."""

    def forget():
        for name in [each for each in sys.modules if each.partition(".")[0] in framework_names.FRAMEWORKS]:
            del sys.modules[name]
        for seen in (installation._hooked, installation._ended):
            seen.difference_update(framework_names.MODULES)

    def write(*replaced):
        for name, source in SOURCES.items():
            for old, new in replaced:
                source = source.replace(old, new)
            path = tmp_path.joinpath(*name.split("."))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_suffix(".py").write_text(source)
        importlib.invalidate_caches()

    forget()
    monkeypatch.syspath_prepend(str(tmp_path))
    write()
    yield write
    if installation._installation is not None:
        bridge_fgo.uninstall()
    forget()


def verl(training):
    module = importlib.import_module(ENGINE)
    engine = module.MegatronEngine()
    engine.module, engine.optimizer = training.model, training.optimizer
    return module, lambda: engine.to("cpu"), lambda: engine.to("cuda")


def verl_functions(training):
    """The functions without the engine's `to`, which has been called once."""
    module, sleep, wake = verl(training)
    sleep()
    wake()
    utils = importlib.import_module(UTILS)

    def off():
        utils.offload_megatron_model_to_cpu(training.model)
        utils.offload_megatron_optimizer(training.optimizer)

    def on():
        utils.load_megatron_model_to_gpu(models=training.model, load_grad=True)
        utils.load_megatron_optimizer(training.optimizer)

    module.CALLS.clear()
    return module, off, on


def skyrl(training):
    module = importlib.import_module(STRATEGY)
    strategy, of = module.MegatronStrategy(), (training.model, training.optimizer)
    return module, lambda: strategy.offload_to_cpu(*of), lambda: strategy.backload_to_gpu(*of)


def nemo_rl(training):
    module = importlib.import_module(POLICY)
    worker = module.MegatronPolicyWorkerImpl()
    worker.model, worker.optimizer = training.model[0], training.optimizer
    return module, worker.offload_after_refit, worker.prepare_for_training


def nemo_rl_value(training):
    module = importlib.import_module(VALUE)
    worker = module.MegatronValueWorkerImpl()
    worker.model, worker.optimizer = training.model[0], training.optimizer

    def move(device):
        assert worker.move_model(worker.model, device) is worker.model
        worker.move_optimizer(device)

    return module, lambda: move("cpu"), lambda: move("cuda")


CYCLES = {
    verl: ["to", "to"],
    verl_functions: [],
    skyrl: [],
    nemo_rl: ["offload_after_refit", "offload_before_refit", "prepare_for_training"],
    nemo_rl_value: [],
}
"""For each way to sleep and wake: the framework's own functions that still run in it."""
ALL = pytest.mark.parametrize("cycle", CYCLES, ids=lambda cycle: cycle.__name__)


@ALL
@pytest.mark.parametrize("changes", [{}, {"frozen": True}], ids=["all trained", "most frozen"])
def test_a_training_that_sleeps_by_a_frameworks_functions_is_bitwise_a_resident_one(
    modules, sleeper, monkeypatch, cycle, changes
):
    bridge_fgo.install(frameworks="auto")
    me = sleeper(1, **changes)
    module, sleep, wake = cycle(me.training)
    for _ in range(3):
        module.CALLS.clear()
        sleep()
        assert me.gone() == {"params", "grads", "optimizer"}
        wake()
        assert not me.res.away
        assert CYCLES[cycle] == module.CALLS
        me.train()
    me.assert_as_resident()


@ALL
def test_an_uninstall_gives_back_the_frameworks_own_functions(modules, sleeper, cycle):
    me = sleeper()
    with bridge_fgo.install(frameworks=["verl", "skyrl", "nemo_rl"]):
        _, sleep, wake = cycle(me.training)
        sleep()
        with pytest.raises(RuntimeError, match=r"cannot uninstall.*have it load them first"):
            bridge_fgo.uninstall()
        wake()
    module, sleep, wake = cycle(me.training)
    sleep()
    assert {"offload_model", "offload_to_cpu", "move_model"} & set(module.CALLS)
    assert bridge_fgo.Residency.of(me.training.model) is None, "its slabs would hold what the framework's own free"
    patched = importlib.import_module(UTILS).offload_megatron_model_to_cpu
    assert not hasattr(patched, "__wrapped__")


def test_who_imported_by_name_what_was_patched_calls_the_frameworks_own_after_an_uninstall(modules):
    model = torch.nn.Linear(4, 4)
    for frameworks, moves in (("verl", True), ((), False), ("verl", True)):
        with bridge_fgo.install(frameworks=frameworks):
            engine = importlib.import_module(ENGINE)
            engine.offload_megatron_model_to_cpu([model])
            assert (bridge_fgo.Residency.of(model) is not None) is moves
            engine.load_megatron_model_to_gpu([model])
    assert engine.CALLS == ["offload_model", "load_model"]


def test_an_uninstall_closes_no_model_that_is_gone_as_other_ranks_may_have_collected_it(modules, sleeper, monkeypatch):
    closed, me = [], sleeper()
    note(monkeypatch, closed, bridge_fgo.Residency, "close", lambda res: res)
    gc.disable()
    try:
        with bridge_fgo.install(frameworks="nemo_rl"):
            _, sleep, wake = nemo_rl(me.training)
            sleep()
            wake()
            worker = importlib.import_module(POLICY).MegatronPolicyWorkerImpl()
            worker.model = torch.nn.Linear(2, 2)
            for device in ("cpu", "cuda"):
                worker.move_model(worker.model, device)
            del worker
    finally:
        gc.enable()
    assert len(closed) == 1


def test_functions_that_were_imported_by_name_before_are_replaced_too_and_once(modules, capsys):
    engine, utils = importlib.import_module(ENGINE), importlib.import_module(UTILS)
    before = engine.load_megatron_model_to_gpu
    with bridge_fgo.install(frameworks="verl"):
        patched = engine.load_megatron_model_to_gpu
        assert patched is utils.load_megatron_model_to_gpu and patched.__wrapped__ is before
        with bridge_fgo.install(frameworks="auto"):
            assert engine.load_megatron_model_to_gpu is patched
    assert engine.load_megatron_model_to_gpu is utils.load_megatron_model_to_gpu is before
    said = capsys.readouterr().out
    assert said.count("bridge_fgo: verl") == 2 and "offload_megatron_optimizer" in said


@pytest.mark.parametrize(
    "old, new, why",
    [
        ("load_frozen_params=True", "load_frozen_params=True, only=None", r"parameters \(models, load_grad, load_fro"),
        ("def load_megatron_optimizer", "def load_optimizer", "it has no load_megatron_optimizer"),
    ],
)
def test_a_module_that_does_not_fit_is_left_alone_with_what_needs_it_and_a_line_says_why(
    modules, monkeypatch, capsys, old, new, why
):
    monkeypatch.setitem(SOURCES, ENGINE, SOURCES[ENGINE].replace(f"from {UTILS} import *", ""))
    modules((old, new))
    utils, engine = importlib.import_module(UTILS), importlib.import_module(ENGINE).MegatronEngine
    before = dict(vars(utils)), engine.to
    bridge_fgo.install(frameworks="auto")
    assert (dict(vars(utils)), engine.to) == before
    capsys.readouterr()
    bridge_fgo.uninstall()
    bridge_fgo.install(frameworks="verl")
    said = capsys.readouterr().out
    assert said.count(f"{UTILS} is left alone") == said.count(f"{ENGINE} is left alone: {UTILS} is") == 1
    assert re.search(why, said), said


def test_actors_that_ray_made_before_and_after_inherit_what_is_patched_also_by_pickle(modules, sleeper, tmp_path):
    """Ray copies methods into the class of an actor, and sends that by value."""
    ray = pytest.importorskip("ray")
    modules(("CALLS = []", "import ray\nCALLS = []"))
    name = "MegatronPolicyWorkerImpl"
    path = tmp_path.joinpath(*POLICY.split(".")).with_suffix(".py")
    path.write_text(path.read_text() + f"@ray.remote(runtime_env={{}})\nclass Actor({name}):\n    pass\n")
    bridge_fgo.install(frameworks="nemo_rl")
    me, module = sleeper(), importlib.import_module(POLICY)
    before = module.Actor.__ray_metadata__.modified_class

    @ray.remote(runtime_env={})
    class Later(module.MegatronPolicyWorkerImpl):
        pass

    for made in (before, Later.__ray_metadata__.modified_class):
        sent = ray.cloudpickle.loads(ray.cloudpickle.dumps(made))
        worker = object.__new__(sent)
        worker.model, worker.optimizer = me.ddp, me.training.optimizer
        worker.move_model(worker.model, "cpu", _ray_trace_ctx=None)
        worker.move_optimizer("cpu")
        assert gone(bridge_fgo.Residency.of(me.ddp)) == {"params", "grads", "optimizer"}
        worker.prepare_for_training()
    assert module.CALLS == ["prepare_for_training"] * 2
    assert "move_model" not in vars(before)
    bridge_fgo.uninstall()
    assert "move_model" in vars(before)


def test_slime_and_miles_are_left_alone_and_a_line_says_why(modules, tmp_path, capsys):
    path = tmp_path / "slime" / "backends" / "megatron_utils" / "actor.py"
    path.parent.mkdir(parents=True)
    path.write_text("")
    bridge_fgo.install(frameworks="auto")
    importlib.import_module("slime.backends.megatron_utils.actor")
    assert "torch_memory_saver" in capsys.readouterr().out


def test_the_environment_variable_installs_as_a_framework_is_imported(modules, monkeypatch):
    monkeypatch.setenv(framework_names.VARIABLE, "verl")
    installation.install_with_frameworks()
    importlib.import_module(STRATEGY)
    assert installation._installation.frameworks == ("verl",)
    engine = importlib.import_module(ENGINE)  # which imports the other module of the table as it is imported itself
    assert hasattr(engine.MegatronEngine.to, "__wrapped__") and hasattr(engine.load_megatron_optimizer, "__wrapped__")
    assert not hasattr(sys.modules[STRATEGY].MegatronStrategy.offload_to_cpu, "__wrapped__")


def test_without_the_variable_an_import_does_nothing_and_with_it_needs_no_torch():
    code = (
        "import sys, bridge_fgo; assert 'torch' not in sys.modules; print(len(bridge_fgo.bridge.installation._hooked))"
    )
    for value, hooks in (("", 0), ("auto", len(framework_names.MODULES))):
        environment = {framework_names.VARIABLE: value, "PATH": ""}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert int(done.stdout) == hooks


@pytest.mark.parametrize("meant", framework_names.VARIABLES)
def test_an_environment_variable_whose_name_is_almost_one_of_these_is_an_error_that_names_it(monkeypatch, meant):
    for name in (meant, "BRIDGE_FGO_DEBUG", "BRIDGE_FGO_LOG_FOLDER", f"{meant}_X", f"{meant}_LOG", f"MY_{meant}"):
        monkeypatch.setenv(name, "given")
    framework_names.refuse_misspelt()
    swapped = f"{meant[:-2]}{meant[-1]}{meant[-2]}"
    for wrong in {meant[:-2], meant[2:], f"{meant}S", meant.lower(), swapped, meant.removesuffix("_GIB")} - {meant}:
        monkeypatch.setenv(wrong, "given")
        with pytest.raises(ValueError, match=f"{wrong}='given': nothing reads it; did you mean {meant}\\?"):
            framework_names.refuse_misspelt()
        monkeypatch.delenv(wrong)
    code, environment = "import bridge_fgo", {f"{meant}S": "given"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "nothing reads it" in done.stderr


def test_an_unknown_framework_is_an_error_that_names_the_setting(modules, monkeypatch):
    for wrong in ("vrl", 3, True, b"verl", {"verl": True}, ["verl", None], [["verl"]]):
        with pytest.raises(ValueError, match=r"install\(frameworks=...\): there is no framework .*; use 'auto' or any"):
            bridge_fgo.install(frameworks=wrong)
    monkeypatch.setenv(framework_names.VARIABLE, "verl,nemo")
    installation.install_with_frameworks()
    with pytest.raises(ValueError, match="environment variable BRIDGE_FGO_FRAMEWORKS: there is no framework 'nemo'"):
        importlib.import_module(UTILS)


@ALL
@pytest.mark.parametrize("changes", [{}, {"frozen": True}], ids=["all trained", "most frozen"])
def test_the_environment_limits_host_memory_and_keeps_frozen_parameters_in_files(
    modules, sleeper, monkeypatch, disk, cycle, changes
):
    for name, value in ((framework_names.LIMIT, "1e-9"), (framework_names.FOLDER, str(disk))):
        monkeypatch.setenv(name, value)
    with bridge_fgo.install(frameworks="auto"):
        me = sleeper(1, **changes)
        _, sleep, wake = cycle(me.training)
        sleep()
        here = {p.requires_grad for p in me.ddp.parameters() if p.untyped_storage().nbytes()}
        assert here == {True} and me.states_bytes() > 0
        wake()
        me.train()
    me.assert_as_resident()


@pytest.mark.parametrize(
    ("name", "given", "use"),
    [
        (framework_names.VARIABLE, "vrl", "use 'auto' or any of"),
        (framework_names.LIMIT, "64 GiB", "use a number of GiB above 0"),
        (framework_names.FOLDER, "/nowhere", "name a folder that has room"),
        (framework_names.FOLDER, "/dev/shm", "name a folder on a disk"),
    ],
)
def test_what_the_environment_says_wrong_is_an_error_whether_it_is_needed_or_not(
    modules, monkeypatch, name, given, use
):
    monkeypatch.setenv(name, given)
    for frameworks in (None, "verl"):
        with pytest.raises(ValueError, match=f"{name}.*'{given}'.*{use}"):
            bridge_fgo.install(frameworks=frameworks)


@ALL
def test_what_a_residency_refuses_stays_with_the_framework_and_a_line_says_why(modules, sleeper, capsys, cycle):
    bridge_fgo.install(frameworks="auto")
    me = sleeper(0)
    me.training.model[0].config.cuda_graph_impl = "local"
    module, sleep, wake = cycle(me.training)
    capsys.readouterr()
    for _ in range(2):
        sleep()
        wake()
    assert bridge_fgo.Residency.of(me.training.model) is None
    assert module.CALLS.count("offload_model") + module.CALLS.count("move_model") + module.CALLS.count("offload_to_cpu")
    said = capsys.readouterr().out
    assert said.count("cuda_graph_impl='local'") == (cycle is not verl_functions)
    me.training.model[0].config.cuda_graph_impl = "none"
    sleep()
    assert bridge_fgo.Residency.of(me.training.model).away, "there is no reason any more"
    wake()


# verl's functions keep what their callers rely on.


@pytest.fixture
def asleep(modules, sleeper):
    """A function that makes a training whose verl engine has slept and woken; returns the sleeper and verl's module."""

    def make(**changes):
        bridge_fgo.install(frameworks="verl")
        me = sleeper(1, **changes)
        verl_functions(me.training)
        return me, importlib.import_module(UTILS), bridge_fgo.Residency.of(me.training.model)

    return make


def test_parameters_are_loaded_without_gradients_for_inference(asleep):
    me, utils, res = asleep()
    utils.offload_megatron_model_to_cpu(me.training.model)
    assert res.away == {"params", "grads"}
    utils.load_megatron_model_to_gpu(me.training.model, False)
    assert res.away == {"grads"}
    utils.load_megatron_model_to_gpu(me.training.model)
    assert not res.away
    me.end()


@pytest.mark.parametrize("name", ["", "layers.0", None], ids=["all of it", "a part of it", "nothing more"])
def test_a_frozen_base_stays_away_and_what_was_frozen_later_is_loaded_with_its_buffer_as_by_verl(asleep, name):
    me, utils, res = asleep(frozen=True)
    base = me.names(frozen)
    for each, param in me.ddp.named_parameters():
        if name is not None and name in each:
            param.requires_grad_(False)
    assert (base < me.names(frozen)) is (name is not None)
    utils.offload_megatron_model_to_cpu(me.training.model)
    utils.load_megatron_model_to_gpu(me.training.model, load_frozen_params=False)
    assert me.names_away() == base and res.away == {"params"}
    utils.load_megatron_model_to_gpu(me.training.model)
    assert not res.away
    me.check()


def test_where_nothing_has_ever_trained_no_parameters_are_loaded_without_the_frozen_ones(modules, sleeper):
    bridge_fgo.install(frameworks="verl")
    me, utils = sleeper(0, frozen_stage=0), importlib.import_module(UTILS)
    utils.offload_megatron_model_to_cpu(me.training.model)
    for loads_frozen in (False, True):
        utils.load_megatron_model_to_gpu(me.training.model, load_frozen_params=loads_frozen)
        assert me.names_away() == (set() if loads_frozen else me.names())
    me.check()


def test_a_copy_of_a_sleeping_or_partly_loaded_model_is_its_parameters_and_may_be_restored_asleep(asleep):
    me, utils, res = asleep(frozen=True)
    utils.offload_megatron_model_to_cpu(me.training.model)
    kept = utils.copy_megatron_model_to_cpu(me.training.model)
    utils.load_megatron_model_to_gpu(me.training.model, load_grad=False, load_frozen_params=False)
    with me.as_before():
        partly = utils.copy_megatron_model_to_cpu(me.training.model)
    assert 0 < len(me.names_away()) < len(me.names())
    assert all(map(torch.equal, kept, me.own)) and all(map(torch.equal, partly, me.own))
    utils.offload_megatron_model_to_cpu(me.training.model)
    utils.restore_megatron_model_from_cpu(me.training.model, cpu_state=[p + 1 for p in kept])
    assert res.away == {"params", "grads"}
    utils.load_megatron_model_to_gpu(me.training.model)
    assert all(torch.equal(p, was + 1) for p, was in zip(me.params(), me.own, strict=True))
    never_slept = torch.nn.Linear(2, 2)
    assert all(map(torch.equal, utils.copy_megatron_model_to_cpu([never_slept]), never_slept.parameters()))


def in_an_except(act):
    try:
        raise RuntimeError("in forward")
    except RuntimeError:
        return act()


@pytest.mark.parametrize("saves", [in_an_except, lambda save: save()], ids=["in an except", "in training"])
@pytest.mark.parametrize("offloads", [False, True])
def test_a_save_of_a_sleeping_model_leaves_its_parameters_where_verl_expects_them(modules, sleeper, offloads, saves):
    bridge_fgo.install(frameworks="verl")
    me = sleeper()
    module, sleep, _ = verl(me.training)
    engine = module.MegatronEngine()
    engine.module, engine.optimizer, engine._is_offload_param = me.training.model, me.training.optimizer, offloads
    sleep()
    saves(lambda: engine.save_checkpoint("a folder"))
    assert all(map(torch.equal, engine.saved, me.own))
    away = {"optimizer", "params", "grads"} if offloads else {"optimizer"}
    assert me.res.away == away
    me.end()


@pytest.mark.slow
def test_two_ranks_save_asleep_where_nothing_trains_on_one_of_them(modules, tmp_path):
    """verl's own asks the rank's first buffer whether to load; this rank has none, and the other would wait for it."""
    job = rank_child.Job(
        tmp_path / "ranks", 2, True, None, timeout=datetime.timedelta(seconds=60), changes={"pp": 2, "frozen_stage": 0}
    )
    for seen in children.run_ranks(functools.partial(rank_child.save_by_verl, modules=str(tmp_path)), job):
        assert seen["saved"] == seen["awake"] and "params" not in seen["away"]


def test_states_that_are_away_are_saved_from_the_host(asleep):
    me, utils, _ = asleep()
    awake = both.exact(me.leaf.state_dict()["optimizer"])
    utils.offload_megatron_optimizer(me.training.optimizer)
    assert both.exact(me.leaf.state_dict()["optimizer"]) == awake
    utils.offload_megatron_optimizer(me.training.optimizer)
    utils.load_megatron_optimizer(me.training.optimizer)
    me.end()


def test_gradients_that_no_step_has_used_survive_a_sleep(asleep):
    me, utils, res = asleep()
    me.ddp.zero_grad_buffer()
    (buffer,) = buffers(me.training)
    sum(p.sum() * (i + 1) for i, p in enumerate(me.ddp.parameters())).backward()
    before = buffer.grad_data.clone()
    assert before.any() and res.has_gradients
    utils.offload_megatron_model_to_cpu(me.training.model)
    assert not buffer.grad_data.untyped_storage().nbytes()
    utils.load_megatron_model_to_gpu(me.training.model)
    assert torch.equal(buffer.grad_data, before)


def test_a_reference_model_without_ddp_sleeps_and_wakes_whole_also_without_frozen_parameters(modules):
    bridge_fgo.install(frameworks="auto")
    utils, strategy = importlib.import_module(UTILS), importlib.import_module(STRATEGY).MegatronStrategy()
    for off, on in (
        (utils.offload_megatron_model_to_cpu, utils.load_megatron_model_to_gpu),
        (utils.offload_megatron_model_to_cpu, lambda model: utils.load_megatron_model_to_gpu(model, False, False)),
        (lambda model: strategy.offload_to_cpu(model, None), lambda model: strategy.backload_to_gpu(model, None)),
    ):
        model = [torch.nn.Linear(3, 2)]
        before = model[0].weight.detach().clone()
        off(model)
        assert not model[0].weight.untyped_storage().nbytes()
        on(model)
        assert torch.equal(model[0].weight, before) and not bridge_fgo.Residency.of(model).away


def test_an_optimizer_whose_model_is_not_known_stays_with_the_framework(modules):
    bridge_fgo.install(frameworks="verl")
    utils = importlib.import_module(UTILS)
    utils.offload_megatron_optimizer(SimpleNamespace())
    assert utils.CALLS == ["offload_optimizer"]
    assert not framework_moves._moved


def test_functions_behind_a_decorator_that_passes_all_on_are_patched(modules, sleeper):
    plain, passed_on = "def offload_{}_refit(self):", "def offload_{}_refit(self, *args, **kwargs):"
    modules(*((plain.format(when), passed_on.format(when)) for when in ("before", "after")))
    me = sleeper()
    with bridge_fgo.install(frameworks="nemo_rl"):
        _, sleep, wake = nemo_rl(me.training)
        sleep()
        assert bridge_fgo.Residency.of(me.training.model).away
        wake()


def test_garbage_in_old_objects_is_collected_if_it_may_hold_gpu_memory_else_in_each_tenth_sleep(
    modules, sleeper, monkeypatch
):
    """NeMo-RL's own function collects all. A thing in a circle that holds memory holds three times what counts."""
    modules(('CALLS.append("offload_before_refit")', "import gc; gc.collect()"))
    things = weakref.WeakSet()
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 3 * LEAST_KEPT_BYTES * sum(t.holds for t in things))

    class Thing:
        def __init__(self, holds):
            self.itself, self.holds = self, holds
            things.add(self)

    def drop_old(*holding):
        made = [Thing(holds) for holds in holding]
        gc.collect()  # they are old objects from here on
        assert len(things) == len(made)

    me, frozen = sleeper(), gc.get_freeze_count()  # by `cpu_standins`, as by a user
    with bridge_fgo.install(frameworks="nemo_rl"):
        _, sleep, wake = nemo_rl(me.training)
        for number, (holding, left) in enumerate([((1, 0), 0), ((0,), 1), ((1, 0), 0), ((0,), 1)]):
            drop_old(*holding)
            sleep()
            assert len(things) == left, f"in sleep {number}"
            wake()
            gc.collect()
        things.clear()
        drop_old(0)
        waited = []
        for _ in range(framework_moves.MOST_OF_NEW):
            sleep()
            wake()
            waited.append(len(things))
        assert waited == [1] * (framework_moves.MOST_OF_NEW - 1) + [0], "one such sleep was before"
    assert gc.get_freeze_count() > 0.9 * frozen > 100_000, "what was frozen stays so"


def test_nothing_moves_while_a_rank_handles_an_error(modules, sleeper):
    """verl's contexts offload as they end, by an error too; the other ranks would wait for this one in a collective."""
    me = sleeper()
    with bridge_fgo.install(frameworks="verl"):
        module, sleep, wake = verl(me.training)

        def sleep_by_an_error():
            try:
                raise torch.cuda.OutOfMemoryError("in forward")
            except torch.cuda.OutOfMemoryError:
                sleep()

        sleep_by_an_error()
        assert bridge_fgo.Residency.of(me.training.model) is None and "offload_model" in module.CALLS
        sleep()
        wake()
        with pytest.warns(UserWarning, match=r"moves nothing while this is handled: .*in forward'\)$"):
            sleep_by_an_error()
        assert not bridge_fgo.Residency.of(me.training.model).away


def test_a_load_in_an_except_loads_where_no_other_rank_would_wait_and_else_names_the_call(
    modules, sleeper, monkeypatch
):
    bridge_fgo.install(frameworks="verl")
    me = sleeper()
    _, sleep, wake = verl(me.training)
    sleep()
    in_an_except(wake)
    assert not me.res.away
    sleep()
    utils = importlib.import_module(UTILS)
    with monkeypatch.context() as two_ranks:
        two_ranks.setattr(framework_moves.torch.distributed, "is_initialized", lambda: True)
        two_ranks.setattr(framework_moves.torch.distributed, "get_world_size", lambda: 2)
        call = re.escape("call bridge_fgo.Residency.of(model).reload('params', 'grads', 'optimizer') on every rank")
        with pytest.warns(UserWarning, match=f"moves nothing while this is handled: .*{call}"):
            in_an_except(wake)
        with pytest.raises(RuntimeError, match="reload"):
            in_an_except(lambda: utils.copy_megatron_model_to_cpu(me.training.model))
    assert me.res.away == {"params", "grads", "optimizer"}
    me.end()


def test_an_import_amid_a_frameworks_own_is_refused(modules):
    modules(
        (
            "CALLS = []\nclass MegatronStrategy",
            "import bridge_fgo\nbridge_fgo.install(frameworks='skyrl')\nclass MegatronStrategy",
        )
    )
    with pytest.raises(RuntimeError, match=f"amid the import of {STRATEGY}.*import bridge_fgo before"):
        importlib.import_module(STRATEGY)
