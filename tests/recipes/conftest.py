"""No network, and no training."""

import socket

import pytest

import bridge_fgo


@pytest.fixture
def no_network(monkeypatch):
    """No network, and nothing in Hugging Face's cache."""

    def refuse(*args):
        raise AssertionError("asked the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *args: None)


@pytest.fixture
def launched(monkeypatch):
    """The configs that `train` hands to Bridge."""
    from megatron.bridge.training import pretrain as bridge_pretrain

    from bridge_fgo.recipes import process, train

    configs = []
    monkeypatch.setattr(bridge_pretrain, "pretrain", lambda config, forward_step: configs.append(config))
    monkeypatch.setattr(process, "skip_building_what_is_built", lambda: None)
    monkeypatch.setattr(train.os, "environ", dict(train.os.environ) | {"RANK": "0"})
    yield configs
    bridge_fgo.uninstall()
