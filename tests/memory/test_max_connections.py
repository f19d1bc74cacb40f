"""The number of CUDA's queues for copies, as `install` leaves it in the environment."""

import os
from types import SimpleNamespace
from unittest import mock

import pytest

import bridge_fgo
from bridge_fgo.memory import max_connections
from bridge_fgo.memory.max_connections import OF_ALL, OF_COPIES


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """No variable is set, and CUDA is not in use."""
    for name in (OF_ALL, OF_COPIES):
        monkeypatch.delenv(name, raising=False)
    use_cuda(monkeypatch, is_initialized=False)
    return monkeypatch


def use_cuda(monkeypatch, is_initialized):
    status = 0 if is_initialized else 3  # the driver's answer before `cuInit`
    driver = SimpleNamespace(cuDeviceGetCount=lambda count: status)
    monkeypatch.setattr(max_connections.ctypes, "CDLL", {"libcuda.so.1": driver}.__getitem__)


@pytest.mark.parametrize(("asked", "kept"), [(None, "8"), ("1", "8"), ("32", "32"), ("many", "8"), ("0", "8")])
def test_copies_keep_as_many_queues_as_without_the_variable_of_kernels(environment, asked, kept):
    if asked is not None:
        environment.setenv(OF_ALL, asked)
    assert max_connections.keep_enough()
    assert os.environ[OF_COPIES] == kept
    assert os.environ.get(OF_ALL) == asked  # kernels start in the order of their launches
    assert max_connections.shortage() is None
    max_connections.take_back()
    assert OF_COPIES not in os.environ


def test_a_number_of_the_users_stays_and_if_cuda_is_in_use_a_shortage_is_said(environment):
    environment.setenv(OF_COPIES, "2")
    assert not max_connections.keep_enough()
    assert os.environ[OF_COPIES] == "2"
    assert "CUDA_DEVICE_MAX_COPY_CONNECTIONS=2" in max_connections.shortage()
    environment.delenv(OF_COPIES)
    environment.setenv(OF_ALL, "1")
    use_cuda(environment, is_initialized=True)
    assert not max_connections.keep_enough()
    assert OF_COPIES not in os.environ
    said = max_connections.shortage()
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1" in said
    assert "export CUDA_DEVICE_MAX_COPY_CONNECTIONS=8" in said
    environment.undo()
    environment.setattr(max_connections.ctypes, "CDLL", mock.Mock(side_effect=OSError("libcuda.so.1: cannot open")))
    assert not max_connections.driver_has_begun()


def test_install_sets_it_and_uninstall_takes_it_back_but_for_a_number_that_the_user_set(monkeypatch, cpu_standins):
    monkeypatch.setenv(OF_ALL, "1")
    with bridge_fgo.install(), bridge_fgo.install():
        assert os.environ[OF_COPIES] == "8"
    assert OF_COPIES not in os.environ
    monkeypatch.setenv(OF_COPIES, "4")
    with bridge_fgo.install():
        assert os.environ[OF_COPIES] == "4"
    assert os.environ[OF_COPIES] == "4"
