"""The settings of the offload are part of the run's config: set by every road of Bridge's, checked, saved."""

import dataclasses
import logging
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

import bridge_fgo
from bridge_fgo.bridge import settings
from bridge_fgo.config import OffloadConfig

GIVEN = {
    "engine": "native",
    "moments": False,
    "master_weights": True,
    "master_remainders": False,
    "fraction": 0.5,
    "gpu_memory_budget_gib": None,  # which cannot be combined with a fraction
    "slab_bytes": 2**21,
    "piece_bytes": 2**17,
    "pin_memory": False,
    "measure": True,
}
"""A value of each setting, all but one other than the default."""


def make_container(offload=True, **given):
    """A whole config of Bridge's, of the CPU lane's model."""
    from megatron.bridge.models import gpt_provider

    from bridge_fgo.tools.arms.cpu_model import CpuOptions, make_config

    config = make_config(CpuOptions(offload=offload))
    config.model.transformer_layer_spec = gpt_provider.default_layer_spec  # ours is not on Bridge's list of targets
    config.optimizer.offload.update(given)
    return config


def overridden(config, *overrides, path=None):
    from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

    return process_config_with_overrides(config, config_filepath=path, cli_overrides=list(overrides))


def in_force(config):
    return settings.settings_of(config.optimizer)


@pytest.fixture
def make_recipe(installed):
    """Return what makes a config container as small as one can be."""
    from megatron.bridge.training.config import OptimizerConfig

    return lambda **given: dataclasses.make_dataclass("Recipe", ["optimizer"])(OptimizerConfig(**given))


@pytest.mark.parametrize("name", GIVEN)
def test_each_setting_can_be_overridden(make_recipe, name):
    config = make_recipe()
    value = "null" if GIVEN[name] is None else str(GIVEN[name]).lower()
    overridden(config, f"optimizer.offload.{name}={value}")
    assert in_force(config) == dataclasses.replace(OffloadConfig(engine="native"), **{name: GIVEN[name]})


def test_a_file_and_a_constructor_set_them(make_recipe, tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_text("optimizer:\n  offload:\n    fraction: 0.5\n")
    config = make_recipe(offload={"moments": False})
    overridden(config, "optimizer.offload.slab_bytes=2097152", path=str(path))
    assert in_force(config) == OffloadConfig(engine="native", moments=False, fraction=0.5, slab_bytes=2**21)


def test_a_misspelt_override_is_refused_and_the_near_one_named(installed):
    from bridge_fgo.recipes.overrides import overridden as with_hint

    config = make_container()
    with pytest.raises(ValueError, match=r"there is no setting .*did you mean optimizer\.offload\.fraction\?"):
        with_hint(config, ["optimizer.offload.fractoin=0.5"])


def test_settings_in_force_are_saved_and_reproduce_the_run(cpu_standins, tmp_path: Path):
    from megatron.bridge.training.config import ConfigContainer

    path, expected = tmp_path / "run_config.yaml", OffloadConfig(**GIVEN | {"moments": True})
    with bridge_fgo.install(OffloadConfig(engine="native", slab_bytes=GIVEN["slab_bytes"])):
        rest = {name: value for name, value in GIVEN.items() if name not in ("engine", "moments", "slab_bytes")}
        config = make_container(**rest)
        config.validate()
        config.to_yaml(str(path))
        assert in_force(config) == expected
    with bridge_fgo.install():  # with no settings of its own, engine="native" neither
        again = ConfigContainer.from_yaml(str(path))
        again.model.transformer_layer_spec = config.model.transformer_layer_spec
        again.validate()
        assert in_force(again) == expected


def test_what_validation_wrote_goes_with_the_uninstall(cpu_standins):
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


def test_configs_made_before_the_install_have_settings_of_their_own(cpu_standins):
    from megatron.bridge.training.config import OptimizerConfig

    one, other = OptimizerConfig(), OptimizerConfig()
    with bridge_fgo.install():
        one.offload["fraction"] = 0.5
        assert other.offload == settings.nothing_set()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"fraction": 9.0}, r"OffloadConfig\.fraction=9\.0"),
        ({"fraction": "half"}, r"OffloadConfig\.fraction='half'"),
        ({"fractoin": 0.5}, r"optimizer\.offload\.fractoin: there is no such setting; did you mean fraction\?"),
        ({"qqqqqq": 0.5}, r"optimizer\.offload\.qqqqqq: there is no such setting; use one of engine, moments"),
        ({"fraction": 0.5, "gpu_memory_budget_gib": 7}, r"gpu_memory_budget_gib=7 with fraction=0\.5"),
        ({"engine": "mcore"}, r"optimizer\.offload\.engine='mcore' .* engine='native' given to bridge_fgo\.install"),
    ],
)
def test_wrong_settings_are_refused_before_training(installed, given, said):
    with pytest.raises(ValueError, match=said):
        make_container(**given).validate()


@pytest.mark.parametrize("field", ["fraction=0.5", 1, [0.5], OffloadConfig(fraction=0.5)])
def test_what_is_no_dict_is_refused(installed, field):
    with pytest.raises(ValueError, match=r"optimizer\.offload=.*: use a dict"):
        settings.settings_of(SimpleNamespace(offload=field))


def test_a_mock_sets_nothing(installed):
    assert settings.settings_of(mock.Mock()) == settings.installed_config()


def test_settings_of_what_is_off_are_said_to_do_nothing(installed, caplog):
    config = make_container(offload=False, fraction=0.5)
    with caplog.at_level(logging.WARNING):
        config.validate()
    assert "nothing is offloaded, in spite of optimizer.offload.fraction=0.5" in caplog.text


def test_the_engine_takes_them_and_they_cannot_change_in_mid_run(cpu_standins, monkeypatch):
    from bridge_fgo.tools.arms import cpu_training

    make_config = cpu_training.make_config

    def with_settings(options):
        config = make_config(options)
        config.optimizer.offload["moments"] = False
        return config

    monkeypatch.setattr(cpu_training, "make_config", with_settings)
    options = cpu_training.CpuOptions(offload=True)
    with bridge_fgo.install(), cpu_training.CpuTraining(options) as training:
        training.step()
        stats = bridge_fgo.stats()
        assert 0 < stats.released_bytes < stats.state_bytes / 2
        training.cfg.optimizer.offload["moments"] = True
        with pytest.raises(ValueError, match=r"settings cannot change while an optimizer trains"):
            training.step()
        training.cfg.optimizer.offload["moments"] = False
        training.step()
