"""The flag is reachable by every road that Bridge offers, and never skipped silently."""

import copy
import dataclasses
import pickle
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

import bridge_fgo
from bridge_fgo import compat
from bridge_fgo.wiring import wrappers

FLAG = "offload_optimizer_states"


@pytest.fixture
def config_module(installed):
    import megatron.bridge.training.config as module

    return module


@dataclasses.dataclass
class Recipe:
    """A config container as small as one can be."""

    optimizer: object


@pytest.mark.parametrize(("engine", "seen"), [("native", False), ("mcore", True)])
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("parameter", ["optimizer_config", "config"])  # of Bridge's function and of MIMO's
def test_only_an_offloader_of_mcores_own_that_serves_the_run_is_built(monkeypatch, engine, seen, fails, parameter):
    flags = (FLAG, "chunked_optimizer_state_offload")
    config = SimpleNamespace(optimizer="adam", use_distributed_optimizer=True, **dict.fromkeys(flags, True))
    found = []

    def see(config):
        found.append([getattr(config, flag) for flag in flags])
        if fails:
            raise KeyError("built halfway")

    setup_optimizer = {
        "config": see,
        "optimizer_config": lambda optimizer_config: see(optimizer_config),
    }
    monkeypatch.setattr(compat, "upstream_generation", lambda: "mcore generation 2")
    with (
        bridge_fgo.install(bridge_fgo.OffloadConfig(engine=engine)),
        pytest.raises(KeyError) if fails else nullcontext(),
    ):
        wrappers.build_optimizer(setup_optimizer[parameter], None, (config,), {})
    assert found == [[seen, seen]]
    assert [getattr(config, flag) for flag in flags] == [True, True]


def test_attribute(config_module):
    config = config_module.OptimizerConfig()
    assert config.offload_optimizer_states is False
    config.offload_optimizer_states = True
    assert dataclasses.asdict(config)[FLAG] is True


def test_constructor_of_bridge_and_of_mcore(config_module):
    from megatron.core.optimizer import OptimizerConfig as mcore_config

    assert config_module.OptimizerConfig(offload_optimizer_states=True).offload_optimizer_states is True
    assert mcore_config(lr=0.1, offload_optimizer_states=True).offload_optimizer_states is True


def test_command_line_override(config_module):
    from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

    recipe = Recipe(config_module.OptimizerConfig())
    process_config_with_overrides(recipe, cli_overrides=[f"optimizer.{FLAG}=true"])
    assert recipe.optimizer.offload_optimizer_states is True


def test_yaml_override(config_module, tmp_path: Path):
    from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

    path = tmp_path / "run.yaml"
    path.write_text(f"optimizer:\n  {FLAG}: true\n")
    recipe = Recipe(config_module.OptimizerConfig())
    process_config_with_overrides(recipe, config_filepath=str(path))
    assert recipe.optimizer.offload_optimizer_states is True


def test_saved_run_config(config_module, tmp_path: Path):
    from megatron.bridge.models import gpt_provider
    from megatron.bridge.training.config import ConfigContainer

    from bridge_fgo.cli.arms.cpu_model import CpuOptions, make_config

    cfg = make_config(CpuOptions(offload=True))
    cfg.model.transformer_layer_spec = gpt_provider.default_layer_spec  # ours is not on Bridge's list of targets
    path = tmp_path / "run_config.yaml"
    cfg.to_yaml(str(path))
    assert f"{FLAG}: true" in path.read_text()
    assert ConfigContainer.from_yaml(str(path)).optimizer.offload_optimizer_states is True


def test_instantiation_from_a_target_in_either_mode(config_module):
    from megatron.bridge.utils.instantiate_utils import InstantiationMode, instantiate

    node = {"_target_": "megatron.bridge.training.config.OptimizerConfig", FLAG: True}
    for mode in (InstantiationMode.LENIENT, InstantiationMode.STRICT):
        assert instantiate(dict(node), mode=mode).offload_optimizer_states is True


def test_copies_replacements_and_pickles_keep_it(config_module):
    config = config_module.OptimizerConfig(offload_optimizer_states=True, lr=0.5)
    copies = [copy.deepcopy(config), dataclasses.replace(config, lr=0.5), pickle.loads(pickle.dumps(config))]
    assert all(c == config and c.offload_optimizer_states is True for c in copies)


def test_two_configs_that_differ_in_the_flag_alone_differ(config_module):
    on, off = (config_module.OptimizerConfig(offload_optimizer_states=value) for value in (True, False))
    assert on != off
    assert "offload_optimizer_states=True" in repr(on)


def test_a_subclass_made_after_install_has_it(config_module):
    @dataclasses.dataclass
    class Mine(config_module.OptimizerConfig):
        extra: int = 3

    assert Mine(offload_optimizer_states=True, extra=4).offload_optimizer_states is True


def test_without_the_package_released_mcore_refuses_it(cpu_standins):
    from megatron.bridge.training.config import OptimizerConfig

    with pytest.raises(TypeError):
        OptimizerConfig(offload_optimizer_states=True)


def test_an_mcore_that_has_the_field_is_left_alone():
    from bridge_fgo.wiring.flag_field import FlagFieldPatch

    @dataclasses.dataclass
    class Base:
        lr: float = 0.0
        offload_optimizer_states: bool = False

    Base.__module__ = "megatron.core.optimizer.optimizer_config"
    module = type("module", (), {"OptimizerConfig": Base})
    before = dict(vars(Base))
    patch = FlagFieldPatch()
    patch.check(module)
    patch.apply(module)
    assert dict(vars(Base)) == before
    patch.undo(module)


@pytest.mark.parametrize("value", ["true", 1, None])
def test_a_value_that_is_no_bool_is_refused_by_name(config_module, value):
    from bridge_fgo.cli.arms.cpu_model import CpuOptions, make_config

    cfg = make_config(CpuOptions())
    cfg.optimizer.offload_optimizer_states = value
    with pytest.raises(ValueError, match=r"optimizer\.offload_optimizer_states="):
        cfg.validate()


def test_both_spellings_of_generation_2_count():
    from types import SimpleNamespace

    from bridge_fgo.compat import flag_is_set

    chunked = SimpleNamespace(offload_optimizer_states=False, chunked_optimizer_state_offload=True)
    assert flag_is_set(chunked)
    chunked.optimizer_state_offload_fraction = 0.0
    assert not flag_is_set(chunked)
    assert flag_is_set(SimpleNamespace(offload_optimizer_states=True))
    assert not flag_is_set(SimpleNamespace())


def test_stats_before_anything_is_attached_is_none(installed):
    assert bridge_fgo.stats() is None
