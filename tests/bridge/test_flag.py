"""The flag is reachable by every road that Bridge offers, and never skipped silently."""

import copy
import dataclasses
import inspect
import pickle
import typing
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

import bridge_fgo
from bridge_fgo.bridge import before_training, compat

FLAG = "offload_optimizer_states"


@pytest.fixture
def config_module(installed):
    import megatron.bridge.training.config as module

    return module


@pytest.fixture
def field_is_ours(cpu_standins):
    """To be asked for before `installed`."""
    from megatron.bridge.training.config import OptimizerConfig

    if FLAG in OptimizerConfig.__dataclass_fields__:
        pytest.skip("this Bridge has the field")


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
        before_training.build_optimizer(setup_optimizer[parameter], None, (config,), {})
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

    from bridge_fgo.tools.arms.cpu_model import CpuOptions, make_config

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


def test_two_configs_that_differ_in_anything_else_still_differ(config_module):
    one, other = (config_module.OptimizerConfig(lr=lr, offload_optimizer_states=True) for lr in (0.1, 0.2))
    assert one != other


def test_a_config_is_compared_with_other_things_as_ever(config_module):
    config = config_module.OptimizerConfig()
    assert config != "a string" and config != None  # noqa: E711
    assert config == mock.ANY  # the other one is asked too


def test_the_repr_is_the_dataclass_own_with_two_fields_more(config_module):
    on, off = (repr(config_module.OptimizerConfig(offload_optimizer_states=value)) for value in (True, False))
    assert f", {FLAG}=True, offload={{'engine': None" in on and on.count("(") == on.count(")")
    assert off == on.replace(f"{FLAG}=True", f"{FLAG}=False")


def test_the_flag_is_a_keyword_of_type_bool_that_is_false(field_is_ours, config_module):
    # What builds command lines from a config reads these.
    parameter = inspect.signature(config_module.OptimizerConfig).parameters[FLAG]
    assert parameter == inspect.Parameter(FLAG, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=bool)
    (field,) = (field for field in dataclasses.fields(config_module.OptimizerConfig) if field.name == FLAG)
    assert (field.default, field.type, field.kw_only) == (False, bool, True)
    assert typing.get_type_hints(config_module.OptimizerConfig)[FLAG] is bool


def test_the_constructor_makes_no_bool_of_what_is_none(config_module):
    # So that `validate` refuses it; bool("false") is True.
    assert config_module.OptimizerConfig(offload_optimizer_states="false").offload_optimizer_states == "false"


def test_subclasses_made_before_install_have_it_until_the_uninstall(field_is_ours):
    from megatron.bridge.training.config import OptimizerConfig

    class Plain(OptimizerConfig):
        pass

    @dataclasses.dataclass
    class Mine(OptimizerConfig):
        extra: int = 3

        def __post_init__(self):
            self.seen = getattr(self, FLAG, None)

    before = repr(Mine())
    with bridge_fgo.install():
        config = Mine(offload_optimizer_states=True, extra=4)
        assert config.offload_optimizer_states is config.seen is True
        assert config != Mine(extra=4) and f"{FLAG}=True" in repr(config)
        assert Plain(offload_optimizer_states=True).offload_optimizer_states is True
    assert repr(Mine()) == before
    for cls in (Mine, Plain):
        with pytest.raises(TypeError):
            cls(offload_optimizer_states=True)


def test_a_subclass_with_a_constructor_and_a_repr_of_its_own_keeps_them(field_is_ours):
    from megatron.bridge.training.config import OptimizerConfig

    @dataclasses.dataclass(repr=False)
    class Mine(OptimizerConfig):
        def __init__(self, extra=3, **kwargs):
            super().__init__(**kwargs)
            self.extra = extra

        def __repr__(self):
            return "Mine"

    class Around(Mine):
        def __repr__(self):
            return f"Around({OptimizerConfig.__repr__(self)})"

    with bridge_fgo.install():
        config = Mine(offload_optimizer_states=True, extra=4, lr=0.5)
        assert (config.offload_optimizer_states, config.extra, config.lr) == (True, 4, 0.5)
        assert list(inspect.signature(Mine).parameters) == ["extra", FLAG, "offload", "kwargs"]
        assert repr(config) == "Mine"
        assert repr(Around(offload_optimizer_states=True)).count(FLAG) == 1


def test_uninstall_refuses_when_a_constructor_was_replaced_since(field_is_ours, monkeypatch, config_module):
    theirs = lambda self, **kwargs: None  # noqa: E731
    with monkeypatch.context() as on_top:
        on_top.setattr(config_module.OptimizerConfig, "__init__", theirs)
        with pytest.raises(RuntimeError, match=r"training\.config\.OptimizerConfig\.__init__ was replaced"):
            bridge_fgo.uninstall()
        assert config_module.OptimizerConfig.__init__ is theirs


def test_a_config_that_is_no_dataclass_any_more_is_refused_by_name():
    from bridge_fgo.bridge.config_fields import ConfigFieldsPatch

    with pytest.raises(RuntimeError, match=rf"OptimizerConfig\.{FLAG}: OptimizerConfig is not a dataclass"):
        ConfigFieldsPatch().check(SimpleNamespace(OptimizerConfig=object))


def test_a_subclass_made_after_install_has_it(config_module):
    @dataclasses.dataclass
    class Mine(config_module.OptimizerConfig):
        extra: int = 3

    assert Mine(offload_optimizer_states=True, extra=4).offload_optimizer_states is True


def test_a_subclass_made_after_install_is_off_and_takes_its_arguments_in_order(field_is_ours, config_module):
    @dataclasses.dataclass
    class Mine(config_module.OptimizerConfig):
        extra: int = 3

    assert Mine().offload_optimizer_states is False
    assert FLAG not in Mine.__match_args__ and Mine.__match_args__[-1] == "extra"


def test_without_the_package_released_mcore_refuses_it(cpu_standins):
    from megatron.bridge.training.config import OptimizerConfig

    with pytest.raises(TypeError):
        OptimizerConfig(offload_optimizer_states=True)


def test_an_mcore_that_has_the_flag_gets_the_settings_alone():
    from bridge_fgo.bridge.config_fields import ConfigFieldsPatch

    @dataclasses.dataclass
    class Base:
        lr: float = 0.0
        offload_optimizer_states: bool = False

    Base.__module__ = "megatron.core.optimizer.optimizer_config"
    module = type("module", (), {"OptimizerConfig": Base})
    before, flag = dict(vars(Base)), Base.__dataclass_fields__[FLAG]
    patch = ConfigFieldsPatch()
    patch.check(module)
    patch.apply(module)
    assert Base.__dataclass_fields__[FLAG] is flag and list(Base.__dataclass_fields__) == ["lr", FLAG, "offload"]
    one = Base(0.5, True)
    assert one == Base(lr=0.5, offload_optimizer_states=True, offload={}) != Base(0.5, True, offload={"fraction": 0.5})
    patch.undo(module)
    assert dict(vars(Base)) == before and list(Base.__dataclass_fields__) == ["lr", FLAG]


@pytest.mark.parametrize("value", ["true", 1, None])
def test_a_value_that_is_no_bool_is_refused_by_name(config_module, value):
    from bridge_fgo.tools.arms.cpu_model import CpuOptions, make_config

    cfg = make_config(CpuOptions())
    cfg.optimizer.offload_optimizer_states = value
    with pytest.raises(ValueError, match=r"optimizer\.offload_optimizer_states="):
        cfg.validate()


def test_both_spellings_of_generation_2_count():
    from types import SimpleNamespace

    from bridge_fgo.bridge.compat import flag_is_set

    chunked = SimpleNamespace(offload_optimizer_states=False, chunked_optimizer_state_offload=True)
    assert flag_is_set(chunked)
    chunked.optimizer_state_offload_fraction = 0.0
    assert not flag_is_set(chunked)
    assert flag_is_set(SimpleNamespace(offload_optimizer_states=True))
    assert not flag_is_set(SimpleNamespace())


def test_stats_before_anything_is_attached_is_none(installed):
    assert bridge_fgo.stats() is None
