"""Which engine serves a run: by capability, never by a version number."""

import re
import sys
from types import SimpleNamespace

import pytest

from bridge_fgo import OffloadConfig
from bridge_fgo.bridge import compat

GENERATIONS = [None, "mcore generation 1", "mcore generation 2"]


@pytest.fixture
def mcore(monkeypatch):
    def use(generation, fused=True):
        monkeypatch.setattr(compat, "upstream_generation", lambda: generation)
        monkeypatch.setattr(compat, "upstream_adam_is_fused", lambda: fused)
        monkeypatch.setattr(compat, "mcore_version", lambda: "0.0")

    return use


@pytest.mark.parametrize("generation", GENERATIONS)
def test_auto_takes_native_on_every_mcore(mcore, generation):
    mcore(generation)
    assert compat.choose_engine(OffloadConfig(), SimpleNamespace()) == "native"


@pytest.mark.parametrize("generation", GENERATIONS[1:])
def test_mcore_takes_its_own_offloader_where_there_is_one(mcore, generation):
    mcore(generation)
    assert compat.choose_engine(OffloadConfig(engine="mcore"), SimpleNamespace()) == generation


@pytest.mark.parametrize("generation", GENERATIONS)
def test_native_may_be_asked_for_on_every_mcore(mcore, generation):
    mcore(generation)
    assert compat.choose_engine(OffloadConfig(engine="native"), SimpleNamespace()) == "native"


def test_mcore_with_a_setting_that_it_does_not_honour_is_refused(mcore):
    mcore("mcore generation 1")
    with pytest.raises(ValueError, match=r"fraction=0\.5"):
        compat.choose_engine(OffloadConfig(engine="mcore", fraction=0.5), SimpleNamespace())


def test_generation_1_with_torchs_adam_is_refused(mcore):
    mcore("mcore generation 1", fused=False)
    with pytest.raises(ValueError, match="FusedAdam"):
        compat.choose_engine(OffloadConfig(engine="mcore"), SimpleNamespace())


def test_generation_2s_own_settings_are_not_dropped_by_native(mcore):
    mcore("mcore generation 2")
    config = SimpleNamespace(optimizer_state_offload_fraction=0.5, optimizer_state_offload_chunk_size_mb=0)
    assert compat.choose_engine(OffloadConfig(), config) == "mcore generation 2"
    for ours in (OffloadConfig(engine="native"), OffloadConfig(fraction=0.5)):
        with pytest.raises(ValueError, match="optimizer_state_offload_fraction"):
            compat.choose_engine(ours, config)


@pytest.mark.parametrize("generation", [None, "mcore generation 1"])
@pytest.mark.parametrize("engine", ["auto", "native"])
@pytest.mark.parametrize(
    ("name", "value"), [("optimizer_state_offload_fraction", 0.5), ("optimizer_state_offload_chunk_size_mb", 256)]
)
def test_generation_2s_own_settings_are_refused_where_it_is_not(mcore, generation, engine, name, value):
    # A config written for the dev branch would else offload everything here.
    mcore(generation)
    with pytest.raises(ValueError, match=f"{name}={value}"):
        compat.choose_engine(OffloadConfig(engine=engine), SimpleNamespace(**{name: value}))


@pytest.mark.parametrize(("version", "expected"), [("0.6.2", (0, 6)), ("0.6.0rc1+abc", (0, 6)), ("unknown", (0, 0))])
def test_release_of_a_version(version, expected):
    assert compat.release(version) == expected


def test_mcores_offloader_where_mcore_has_none_is_refused(mcore):
    mcore(None)
    with pytest.raises(ValueError, match="has no optimizer-state offloader"):
        compat.choose_engine(OffloadConfig(engine="mcore"), SimpleNamespace())


@pytest.mark.parametrize("flag", [compat.FLAG, compat.CHUNKED_FLAG])
@pytest.mark.parametrize("value", ["true", 1, 0.0, None])
def test_a_flag_that_is_no_bool_is_refused(flag, value):
    config = SimpleNamespace(**{flag: value})
    assert not compat.flag_is_set(config)
    with pytest.raises(ValueError, match=rf"optimizer\.{flag}={re.escape(repr(value))}"):
        compat.check_flag(config)


def test_as_if_set_leaves_the_config_alone():
    config = SimpleNamespace()
    asked, like = compat.as_if_set(config)
    assert not asked and getattr(like, compat.FLAG) is True and not hasattr(config, compat.FLAG)


def test_a_version_is_told_without_its_local_part(monkeypatch):
    package = SimpleNamespace(__version__="0.19.2+abc")
    monkeypatch.setitem(sys.modules, "megatron.core.package_info", package)
    assert compat.mcore_version() == "0.19.2"
