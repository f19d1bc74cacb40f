"""What this package and a patched Bridge are to each other. Run by `test_series.py`, on a patched copy of the wheel."""

import pytest
from cpu_model import CpuOptions, make_config
from loop import Loop
from test_order import ONE_PASS

import bridge_fgo


@pytest.fixture
def series(cpu_standins):
    """The module that the series adds."""
    from megatron.bridge.training import optimizer_state_offload

    return optimizer_state_offload


def test_install_takes_over_and_uninstall_gives_back(series):
    assert series.EXTERNAL_DRIVER is None
    with bridge_fgo.install():
        assert series.EXTERNAL_DRIVER == "bridge_fgo"
    assert series.EXTERNAL_DRIVER is None


def test_with_both_the_states_are_driven_once(monkeypatch, bridge_train, series, installed):
    loop = Loop(monkeypatch, bridge_train)
    assert loop.step() == [*ONE_PASS, "step", "settle"]
    monkeypatch.setattr(series, "EXTERNAL_DRIVER", None)
    with pytest.raises(ValueError, match="before the optimizer is built"):  # so the patched calls are there
        loop.step()
    monkeypatch.undo()


def test_another_driver_is_not_pushed_aside(monkeypatch, series):
    monkeypatch.setattr(series, "EXTERNAL_DRIVER", "another package")
    with pytest.raises(RuntimeError, match="'another package'"):
        bridge_fgo.install()
    assert series.EXTERNAL_DRIVER == "another package"


def test_a_series_of_another_version_is_refused_by_name(monkeypatch, series):
    monkeypatch.delattr(series, "EXTERNAL_DRIVER")
    with pytest.raises(RuntimeError, match=r"optimizer_state_offload\.EXTERNAL_DRIVER is not there"):
        bridge_fgo.install()
    assert not hasattr(series, "EXTERNAL_DRIVER")


def test_uninstall_refuses_when_another_driver_has_taken_over(monkeypatch, series, installed):
    with monkeypatch.context() as since:
        since.setattr(series, "EXTERNAL_DRIVER", "another package")
        with pytest.raises(RuntimeError, match=r"optimizer_state_offload\.EXTERNAL_DRIVER was replaced after"):
            bridge_fgo.uninstall()
        assert series.EXTERNAL_DRIVER == "another package"


def test_on_an_mcore_without_an_offloader_validate_asks_this_package(series, bridge_train):
    cfg = make_config(CpuOptions())
    cfg.optimizer.offload_optimizer_states = True
    try:
        cfg.validate()
        assert series.EXTERNAL_DRIVER == "bridge_fgo"
        assert hasattr(bridge_train.train_step, "__wrapped__")
    finally:
        bridge_fgo.uninstall()


def test_with_the_flag_unset_validate_asks_nobody(series):
    make_config(CpuOptions()).validate()
    assert series.EXTERNAL_DRIVER is None


def test_validate_refuses_what_mcores_offloader_cannot_do(monkeypatch, series):
    monkeypatch.setattr(series, "mcore_generation", lambda: 2)
    cfg = make_config(CpuOptions())
    cfg.optimizer.offload_optimizer_states = cfg.optimizer.optimizer_cuda_graph = True
    with pytest.raises(ValueError, match="optimizer_cuda_graph=True"):
        cfg.validate()
