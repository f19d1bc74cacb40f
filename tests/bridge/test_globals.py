"""What is global in a process is listed in one place, which says what ends it."""

import ast
import importlib
import re
from collections.abc import MutableMapping, MutableSequence, MutableSet
from pathlib import Path
from threading import RLock
from weakref import WeakSet

import torch
from both import WHOLE, steps, training

import bridge_fgo
from bridge_fgo.bridge import activation_offload, framework_moves, installation, patch, settings

PACKAGE = Path(bridge_fgo.__file__).parent
MUTABLE = (MutableMapping, MutableSequence, MutableSet, WeakSet, type(RLock()), settings.Caller)
BY_UNINSTALL, *BY_OTHERS = (
    re.findall(r"`(\w+)\.(\w+)`", part) for part in re.split(r"\n- ", installation.__doc__ or "")[1:]
)
"""Names of modules and of what is global in them, by what ends it."""


def global_names(path):
    """Yield the names that a module's functions rebind, or that it binds to what can be changed."""
    tree, name = ast.parse(path.read_text()), ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield from node.names
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for each in (target.id for target in targets if isinstance(target, ast.Name)):
            if each == each.lower() and isinstance(getattr(importlib.import_module(name), each, None), MUTABLE):
                yield each


def test_what_is_global_in_a_process_is_listed_with_what_ends_it():
    parts = ("bridge", "engines", "memory", "offload", "sleep", "states")
    paths = [path for part in parts for path in (PACKAGE / part).glob("*.py")] + list(PACKAGE.glob("[a-z]*.py"))
    found = {(path.stem, name) for path in paths for name in global_names(path)}
    assert sorted(found) == sorted({*BY_UNINSTALL, *(pair for pairs in BY_OTHERS for pair in pairs)})


def test_an_uninstall_leaves_what_it_ends_as_before_the_first_install(cpu_standins):
    def held():
        places = {module.__name__.rpartition(".")[2]: module for module in map(importlib.import_module, names)}
        return {pair for pair in BY_UNINSTALL if getattr(places[pair[0]], pair[1])}

    names = {f"bridge_fgo.bridge.{module}" for module, _ in BY_UNINSTALL}
    with training(True, WHOLE) as run:
        steps(run, 2)
        activation_offload.add_waits(64)
        patch.warned.add(("megatron-bridge", "9.0"))
        framework_moves._left[frozenset()] = framework_moves._of_new = 1
        framework_moves._refused[run.model[0]] = "why"
        framework_moves._models[run.optimizer] = ()
        reference = torch.nn.Linear(2, 2)
        framework_moves._made.add(bridge_fgo.Residency(reference))
        not_held = {("frameworks", "_patched_now"), ("session", "_taken")}
        assert held() == set(BY_UNINSTALL) - not_held
        bridge_fgo.uninstall()
        assert not held()
