"""The flag is reachable by every road that Bridge offers, and never skipped silently.

The settings of the offload are part of the run's config too: set by every road, checked, saved.
"""

import copy
import dataclasses
import inspect
import logging
import pickle
import typing
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

import bridge_fgo
from bridge_fgo.bridge import before_training, compat, refusals, settings
from bridge_fgo.bridge.config_fields import ConfigFieldsPatch
from bridge_fgo.config import OffloadConfig

FLAG = "offload_optimizer_states"


@pytest.fixture
def config_class(installed):
    from megatron.bridge.training.config import OptimizerConfig

    return OptimizerConfig


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


def make_container(offload=True, **given):
    """A whole config of Bridge's, of the CPU lane's model."""
    from cpu_model import CpuOptions, make_config
    from megatron.bridge.models import gpt_provider

    config = make_config(CpuOptions(offload=offload))
    config.model.transformer_layer_spec = gpt_provider.default_layer_spec  # ours is not on Bridge's list of targets
    config.optimizer.offload.update(given)
    return config


def overridden(config, *overrides, path=None):
    from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

    return process_config_with_overrides(config, config_filepath=path, cli_overrides=list(overrides))


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

    setup_optimizer = {"config": see, "optimizer_config": lambda optimizer_config: see(optimizer_config)}
    monkeypatch.setattr(compat, "upstream_generation", lambda: "mcore generation 2")
    with (
        bridge_fgo.install(bridge_fgo.OffloadConfig(engine=engine)),
        pytest.raises(KeyError) if fails else nullcontext(),
    ):
        before_training.build_optimizer(setup_optimizer[parameter], None, (config,), {})
    assert found == [[seen, seen]]
    assert [getattr(config, flag) for flag in flags] == [True, True]


# Roads on which the flag is set: each returns the configs that come of it.


def attribute(cls, folder):
    config = cls()
    assert config.offload_optimizer_states is False
    config.offload_optimizer_states = True
    assert dataclasses.asdict(config)[FLAG] is True
    return [config]


def constructors_of_bridge_and_mcore(cls, folder):
    from megatron.core.optimizer import OptimizerConfig as McoreConfig

    return [cls(offload_optimizer_states=True), McoreConfig(lr=0.1, offload_optimizer_states=True)]


def override(cls, folder):
    """On the command line and in a file."""
    (folder / "run.yaml").write_text(f"optimizer:\n  {FLAG}: true\n")
    recipes = [Recipe(cls()) for _ in range(2)]
    overridden(recipes[0], f"optimizer.{FLAG}=true")
    overridden(recipes[1], path=str(folder / "run.yaml"))
    return [recipe.optimizer for recipe in recipes]


def saved_run_config(cls, folder):
    from megatron.bridge.training.config import ConfigContainer

    path = folder / "run_config.yaml"
    make_container().to_yaml(str(path))
    assert f"{FLAG}: true" in path.read_text()
    return [ConfigContainer.from_yaml(str(path)).optimizer]


def instantiation_from_a_target_in_either_mode(cls, folder):
    from megatron.bridge.utils.instantiate_utils import InstantiationMode, instantiate

    node = {"_target_": "megatron.bridge.training.config.OptimizerConfig", FLAG: True}
    return [instantiate(dict(node), mode=mode) for mode in (InstantiationMode.LENIENT, InstantiationMode.STRICT)]


def copies_replacements_and_pickles(cls, folder):
    config = cls(offload_optimizer_states=True, lr=0.5)
    copies = [copy.deepcopy(config), dataclasses.replace(config, lr=0.5), pickle.loads(pickle.dumps(config))]
    assert copies == [config] * 3
    return copies


def a_subclass_made_after_install(cls, folder):
    @dataclasses.dataclass
    class Mine(cls):
        extra: int = 3

    return [Mine(offload_optimizer_states=True, extra=4)]


ROADS = [
    attribute, constructors_of_bridge_and_mcore, override, saved_run_config, instantiation_from_a_target_in_either_mode,
    copies_replacements_and_pickles, a_subclass_made_after_install,
]  # fmt: skip


@pytest.mark.parametrize("road", ROADS)
def test_the_flag_is_set_by(config_class, tmp_path: Path, road):
    assert {config.offload_optimizer_states for config in road(config_class, tmp_path)} == {True}


def test_a_config_is_compared_and_shown_with_the_flag(config_class):
    on, off, other = (
        config_class(lr=lr, offload_optimizer_states=value) for lr, value in ((0.1, True), (0.1, False), (0.2, True))
    )
    assert on != off and on != other and on != "a string" and on != None  # noqa: E711
    assert on == mock.ANY  # the other one is asked too
    assert f", {FLAG}=True, offload={{'engine': None" in repr(on) and repr(on).count("(") == repr(on).count(")")
    assert repr(off) == repr(on).replace(f"{FLAG}=True", f"{FLAG}=False")


def test_the_flag_is_a_keyword_of_type_bool_that_is_false_in_a_subclass_too(field_is_ours, config_class):
    # What builds command lines from a config reads these.
    parameter = inspect.signature(config_class).parameters[FLAG]
    assert parameter == inspect.Parameter(FLAG, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=bool)
    (field,) = (field for field in dataclasses.fields(config_class) if field.name == FLAG)
    assert (field.default, field.type, field.kw_only) == (False, bool, True)
    assert typing.get_type_hints(config_class)[FLAG] is bool

    @dataclasses.dataclass
    class Mine(config_class):
        extra: int = 3

    assert Mine().offload_optimizer_states is False
    assert FLAG not in Mine.__match_args__ and Mine.__match_args__[-1] == "extra"


def test_a_subclass_made_before_install_has_the_flag_until_the_uninstall_and_keeps_what_is_its_own(field_is_ours):
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


def test_a_config_that_is_no_dataclass_is_refused():
    with pytest.raises(RuntimeError, match=rf"OptimizerConfig\.{FLAG}: OptimizerConfig is not a dataclass"):
        ConfigFieldsPatch().check(SimpleNamespace(OptimizerConfig=object))


def test_an_mcore_that_has_the_flag_gets_the_settings_alone():
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
    patch.undo()
    assert dict(vars(Base)) == before and list(Base.__dataclass_fields__) == ["lr", FLAG]


@pytest.mark.parametrize("value", ["true", "false", 1, None])
def test_a_value_that_is_no_bool_stays_what_it_is_and_is_refused_by_name(config_class, value):
    given = config_class(offload_optimizer_states=value).offload_optimizer_states
    assert given is value, "the constructor makes no bool of it: bool('false') is True"
    cfg = make_container()
    cfg.optimizer.offload_optimizer_states = given
    with pytest.raises(ValueError, match=r"optimizer\.offload_optimizer_states="):
        cfg.validate()


# Settings.

GIVEN = {
    "engine": "native",
    "moments": False,
    "master_weights": True,
    "master_remainders": False,
    "fraction": 0.5,
    "gpu_memory_budget_gib": None,  # which cannot be combined with a fraction
    "gradients": True,
    "slab_bytes": 2**21,
    "piece_bytes": 2**17,
    "pin_memory": False,
    "measure": True,
}
"""A value of each setting, all but one other than the default."""


def in_force(config):
    return settings.settings_of(config.optimizer)


OVERRIDES = [(name, "null" if value is None else str(value).lower(), value) for name, value in GIVEN.items()] + [
    ("gradients", text, value) for text, value in (("lazy", "lazy"), ("True", True), ("false", False))
]


@pytest.mark.parametrize(("name", "text", "value"), OVERRIDES)
def test_each_setting_can_be_overridden(config_class, name, text, value):
    config = Recipe(config_class())
    overridden(config, f"optimizer.offload.{name}={text}")
    assert in_force(config) == dataclasses.replace(OffloadConfig(engine="native"), **{name: value})
    assert type(getattr(in_force(config), name)) is type(value), "True is no 1, and 'true' neither"


def test_a_file_and_a_constructor_set_them(config_class, tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_text("optimizer:\n  offload:\n    fraction: 0.5\n")
    config = Recipe(config_class(offload={"moments": False}))
    overridden(config, "optimizer.offload.slab_bytes=2097152", path=str(path))
    assert in_force(config) == OffloadConfig(engine="native", moments=False, fraction=0.5, slab_bytes=2**21)


def test_settings_in_force_are_saved_and_reproduce_the_run(cpu_standins, tmp_path: Path):
    from megatron.bridge.training.config import ConfigContainer

    path, expected = tmp_path / "run_config.yaml", OffloadConfig(**GIVEN | {"moments": True})
    with bridge_fgo.install(OffloadConfig(engine="native", slab_bytes=GIVEN["slab_bytes"])):
        rest = {name: value for name, value in GIVEN.items() if name not in ("engine", "moments", "slab_bytes")}
        config = make_container(**rest)
        config.ddp.overlap_grad_reduce = True
        config.validate()
        config.to_yaml(str(path))
        assert in_force(config) == expected
    with bridge_fgo.install():  # with no settings of its own, engine="native" neither
        again = ConfigContainer.from_yaml(str(path))
        again.model.transformer_layer_spec = config.model.transformer_layer_spec
        again.validate()
        assert in_force(again) == expected


def test_what_validation_wrote_goes_with_the_uninstall_and_each_config_has_its_own_settings(cpu_standins):
    with bridge_fgo.install(OffloadConfig(fraction=0.5)):
        import megatron.bridge.training.config  # noqa: F401

        config = make_container(moments=False)
        for _ in range(2):
            config.validate()
            assert config.optimizer.offload == dataclasses.asdict(OffloadConfig(fraction=0.5, moments=False))
    assert config.optimizer.offload == settings.nothing_set() | {"moments": False}
    with bridge_fgo.install(OffloadConfig(fraction=0.25)):
        config.validate()
        assert config.optimizer.offload["fraction"] == 0.25

    from megatron.bridge.training.config import OptimizerConfig

    one, other = OptimizerConfig(), OptimizerConfig()
    with bridge_fgo.install():
        one.offload["fraction"] = 0.5
        assert other.offload == settings.nothing_set()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"fraction": 9.0}, r"OffloadConfig\.fraction=9\.0"),
        ({"fractoin": 0.5}, r"optimizer\.offload\.fractoin: there is no such setting; did you mean fraction\?"),
        ({"qqqqqq": 0.5}, r"optimizer\.offload\.qqqqqq: there is no such setting; use one of engine, moments"),
        ({"engine": "mcore"}, r"optimizer\.offload\.engine='mcore' .* engine='native' given to bridge_fgo\.install"),
        *((none, r"optimizer\.offload=.*: use a dict") for none in ("fraction=0.5", 1, [0.5], {"a"}, OffloadConfig())),
    ],
)
def test_wrong_settings_are_refused_before_training(installed, given, said):
    config = make_container()
    config.optimizer.offload = given
    with pytest.raises(ValueError, match=said):
        config.validate()


@pytest.mark.parametrize("place", ["", "optimizer", "model"])
@pytest.mark.parametrize("name", ["offload_optimizer_states", "offload_optimizer_state", "offload_optimiser_states"])
def test_a_flag_of_another_name_or_in_another_section_is_refused_by_its_own(installed, place, name):
    config = make_container(offload=place == "optimizer" and name == FLAG)
    setattr(getattr(config, place) if place else config, name, True)
    if (place, name) == ("optimizer", FLAG):
        config.validate()
        return
    said = rf"^{place}{'.' * bool(place)}{name}=True: .* set optimizer\.{FLAG}=True"
    with pytest.raises(ValueError, match=said):
        config.validate()


def test_a_users_own_section_a_field_of_almost_that_name_and_what_speaks_of_loads_are_no_flags(installed):
    @dataclasses.dataclass(kw_only=True)
    class Mine(type(make_container().optimizer)):
        offload_optimizer: bool

    config = make_container(offload=False)
    config.mine = SimpleNamespace(offload_optimizer=True, **{FLAG: True})
    config.model.load_optimizer_states = config.model.reload_optimizer_states = True
    config.optimizer = Mine(**vars(config.optimizer), offload_optimizer=True)
    assert list(refusals.misspelt_flags(config)) == []


@pytest.mark.parametrize("given", ["optimizer.offload.fraction=0.5", "OffloadConfig.fraction=0.5", ""])
def test_settings_of_what_is_off_are_said_to_do_nothing(cpu_standins, caplog, given):
    with bridge_fgo.install(OffloadConfig(measure=True, fraction=0.5 if "Config" in given else 1.0)):
        import megatron.bridge.training.config  # noqa: F401

        config = make_container(offload=False, **{"fraction": 0.5} if "optimizer" in given else {})
        with caplog.at_level(logging.WARNING):
            config.validate()
    assert ("train_step offloads nothing" in caplog.text) == bool(given) and given in caplog.text


def test_a_mock_sets_nothing(installed):
    assert settings.settings_of(mock.Mock()) == settings.installed_config()


def test_the_engine_takes_them_and_they_cannot_change_in_mid_run(cpu_standins):
    from both import training

    with training(True, OffloadConfig(), configured={"optimizer.offload": {"moments": False}}) as run:
        run.step()
        stats = bridge_fgo.stats()
        assert 0 < stats.released_bytes < stats.state_bytes / 2
        run.cfg.optimizer.offload["moments"] = True
        with pytest.raises(ValueError, match=r"settings cannot change while an optimizer trains"):
            run.step()
        run.cfg.optimizer.offload["moments"] = False
        run.step()
