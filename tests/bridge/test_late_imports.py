"""A module that is imported after install(): patched at its import, or the import fails."""

import importlib
import sys

import pytest

import bridge_fgo
from bridge_fgo.bridge import patch, settings, table
from bridge_fgo.bridge.patch import FunctionPatch


@pytest.fixture
def late(monkeypatch, tmp_path):
    """The name of a module that is not imported yet; the table has the first of its two functions."""
    name = f"late_{tmp_path.name}"  # a name of its own in each test: a hook that was not called stays
    (tmp_path / f"{name}.py").write_text("def train_step(model): return model\n\nevaluate = train_step\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(patch, "version_of", lambda name: "0.6.2")
    one = FunctionPatch(name, "train_step", lambda wrapped, instance, args, kwargs: "patched", ("model",), "")
    monkeypatch.setattr(table, "patches", lambda: [one])
    yield name
    sys.modules.pop(name, None)


def test_a_module_that_does_not_fit_fails_its_import_and_leaves_nothing_installed(monkeypatch, late):
    bridge_fgo.install()
    monkeypatch.setattr(patch, "version_of", lambda name: "0.5.0")
    with pytest.raises(RuntimeError, match=r"found 0\.5\.0"):
        importlib.import_module(late)
    other = bridge_fgo.OffloadConfig(fraction=0.5)
    bridge_fgo.install(other).uninstall()  # refused if the first were installed still


def test_a_module_that_was_refused_is_patched_once_the_cause_is_gone(monkeypatch, late):
    with monkeypatch.context() as too_old, bridge_fgo.install():
        too_old.setattr(patch, "version_of", lambda name: "0.5.0")
        with pytest.raises(RuntimeError):
            importlib.import_module(late)
    with bridge_fgo.install():
        assert importlib.import_module(late).train_step(1) == "patched"


@pytest.mark.parametrize("imported", ["before", "after"])
def test_any_error_of_a_patch_leaves_nothing_installed(monkeypatch, late, imported):
    works, fails = [*table.patches(), FunctionPatch(late, "evaluate", lambda *args: None, (), "")]
    apply = fails.apply

    def fail(module):
        apply(module)  # what it has done by then is undone too
        raise TypeError("of an apply")

    monkeypatch.setattr(fails, "apply", fail)
    monkeypatch.setattr(table, "patches", lambda: [works, fails])
    with pytest.raises(TypeError, match="of an apply"):
        if imported == "before":
            importlib.import_module(late)
        bridge_fgo.install()
        importlib.import_module(late)
    assert not settings.is_installed()
    monkeypatch.setattr(table, "patches", lambda: [works])
    module = importlib.import_module(late)
    assert module.train_step(1) == module.evaluate(1) == 1
    with bridge_fgo.install():
        assert module.train_step(1) == "patched"


def test_a_module_imported_after_an_uninstall_is_left_as_it_is(late):
    bridge_fgo.install().uninstall()
    assert importlib.import_module(late).train_step(1) == 1
