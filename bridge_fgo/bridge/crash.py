"""Keeps with each step what Bridge's training has beside the slabs, and restarts training from a kept step.

`engines.kept_steps` has the time line, and says which step is whole. A step's small state is all that a checkpoint has
beyond what slabs hold, by the functions of Bridge, mcore and torch (`Survival._small_state`), and model state that no
master tells. Frozen weights are not copied: a start loads them as Bridge does, and compares sums over their bytes.

Bridge's setup asks whether there is a checkpoint to load, and gets the kept step in its place, unless the config has
changed, a checkpoint is newer, or `MOST_TRIES` starts from that step have failed. Random numbers are set again as the
first step begins: to make the loaders' iterators draws some.
"""

from __future__ import annotations

import atexit
import inspect
import io
import itertools
import json
import pickle
import random
import re
import sys
import time
from collections.abc import Sequence
from functools import cached_property
from typing import Any, override

import numpy as np
import torch

from bridge_fgo.bridge.compat import settings_in, version_of
from bridge_fgo.bridge.patch import Args, Kwargs, Wrapped, arguments_of
from bridge_fgo.bridge.reporting import say, warn
from bridge_fgo.config import readable
from bridge_fgo.engines.buddies import Buddy
from bridge_fgo.engines.engine import Engine
from bridge_fgo.engines.kept_steps import KeptSteps, common_start, layout_of
from bridge_fgo.engines.native import NativeEngine
from bridge_fgo.engines.ranks import gather
from bridge_fgo.memory.digest import byte_sums
from bridge_fgo.memory.host_memory import pools
from bridge_fgo.memory.keeper import VARIABLE, KeeperLine, job_name
from bridge_fgo.states.distributed import TORCH, McoreSource

MOST_TRIES = 3
"""Starts from one kept step. If none of them gets to the next one, the step itself may be what ends them."""
BESIDE_BYTES = 64 * 2**20
"""Most bytes of the model's tensors that are copied in each step, on the training stream: 1.2 ms on an H200's link."""
PARTS = ("model", "optimizer", "scheduler", "ddp", "train", "validation", "dataset", "rng", "mixed_precision", "peft")
OF_CHECKPOINT = ("load", "ckpt_step", "finetune", "pretrained_checkpoint", "load_optim")
DISTRIBUTIONS = ("megatron-bridge", "megatron-core", "bridge-fgo", "transformer-engine", "torch")
"""Sections of Bridge's config, settings of another, and versions that have to be as they were."""
SETTING = "OffloadConfig.survive_crash=True"

_newest: Survival | None = None


class Survival:
    """The kept steps of one training on this rank.

    Raises:
        ValueError: nothing keeps, or a rank has too many bytes beside its slabs.
    """

    def __init__(self, sources: Sequence[Any], engine: Engine, chunks: Sequence[Any]) -> None:
        assert isinstance(engine, NativeEngine)  # with another the setting is refused
        if not job_name():
            raise ValueError(
                f"{SETTING}: no process keeps the states' memory: start training on each node by `bridge-fgo keep -- "
                "COMMAND` (`bridge-fgo keep -- torchrun --max-restarts=3 ...`), or set it to False"
            )
        self._engine, self._chunks = engine, chunks
        self._leaves = [source.optimizer for source in sources if isinstance(source, McoreSource)]
        modules = [module for chunk in chunks for module in chunk.modules()]
        self._beside = _tensors_beside(modules)
        self._extra = [m for m in modules if type(m).get_extra_state is not torch.nn.Module.get_extra_state]
        if (nbytes := sum(tensors[name].nbytes for tensors, name in self._beside)) > BESIDE_BYTES:
            raise ValueError(
                f"{SETTING}: this rank has {readable(nbytes)} of weights in fp32 and of buffers, which no master tells "
                f"and each step copies, and may have {readable(BESIDE_BYTES)}: train in bf16, or set it to False"
            )
        several = torch.distributed.is_initialized()
        self._place = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if several else (0, 1)
        self.kept: KeptSteps | None = None
        self._line: KeeperLine | None = None
        self._step: int | None = None  # to go on from
        self._why = ""  # why no kept step is taken, if there might be one
        self._is_set_up = False  # whether Bridge's setup has asked
        self.resumed: dict[str, Any] | None = None  # the small state of a kept step, until the first step has begun
        self._iterators: Sequence[Any] = ()
        self._is_whole = self._is_over = False  # whether every state exists; whether training has ended
        self.restored_step: int | None = None
        self.seconds: dict[str, float] = {}

    def agree(self) -> None:
        """Connect to the keeper, and agree with all ranks on the step to go on from; a collective.

        Without a keeper training goes on as without the setting, and rank 0 says so.
        """
        started, slabs = time.perf_counter(), self._engine.slabs
        layout = layout_of(slabs, *self._place)
        every, buddy = self._engine.config.copies_to_buddy_every, None
        if every is not None:
            node = f"{pools()[0].identity} {job_name()}"
            buddy = Buddy(gather((node, layout, [slab.nbytes for slab in slabs])), every, warn)
        problems, tries, of_wards = zip(*gather(self._connect(layout, buddy)), strict=True)
        if why := next((f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem), ""):
            self.kept = None
            say(f"{SETTING}, but a crash would cost all steps since the newest checkpoint: {why}")
            return
        assert self.kept is not None
        by_buddy = of_wards if buddy is None else [of_wards[rank] for rank in buddy.of_all]
        step, lacking, whole = common_start(list(map(set, tries)), by_buddy)
        if step is None and any(tries):
            rank = next((rank for rank, steps in enumerate(tries) if not steps), 0)
            self._why = f"rank {rank} has none, as its node or its keeper was lost, or other states"
        if (most := max(each.get(step, 0) for each in tries)) >= MOST_TRIES:
            self._why, step, lacking, whole = f"{most} starts from step {step} have failed", None, [], None
        self._step, self.seconds["agree"] = step, time.perf_counter() - started
        if step is not None and lacking:
            self.kept.restore(step, lacking)
            self.seconds["other nodes"] = seconds = time.perf_counter() - started - self.seconds["agree"]
            ranks, nbytes = ", ".join(map(str, lacking)), readable(self._engine.planned_bytes)
            say(f"step {step} of rank {ranks} is from the keeper of another node: {nbytes} each in {seconds:.2f} s")
        self.kept.protect(step, whole)
        self.kept.take_buffers()
        self._engine.hosts_beside += self.kept.hosts_of_ward
        by = f"a process of its node{f', and one of {every} by that of another' if buddy else ''}"
        say(f"finished steps survive a crash: {readable(self.kept.nbytes)} of host memory a rank are kept by {by}")

    def _connect(self, layout: bytes, buddy: Buddy | None) -> tuple[str, dict[int, int], set[int]]:
        """Return why nothing can be kept, or "", how often starts from each step were tried, and steps of a ward."""
        try:
            self._line = KeeperLine(job_name(), *self._place)
            self.kept = KeptSteps(self._engine.slabs, self._engine.transfers, self._line, layout, buddy)
        except (OSError, MemoryError) as error:
            return f"no step is kept by {job_name()!r} ({VARIABLE}): {error}", {}, set()
        return "", {step: self.kept.tries(step) for step in self.kept.found}, set(self.kept.of_ward)

    # Bridge's setup.

    def is_to_load(self, cfg: Any, manager: Any, loads: bool) -> bool:
        """Return whether setup is to load: the kept step, for which `manager` is changed, or what it `loads` anyway."""
        self._is_set_up = True
        if self.kept is None:
            return loads
        config = json.dumps(_described(cfg, self._place[1])).encode()
        step, why = self._step, max(gather(self._why or _difference(self.kept.config, config)))
        # On all ranks or on none, as Bridge reads a checkpoint's step by collectives.
        if not why and step is not None and (newest := max(gather(_newest_checkpoint(cfg, manager)))) > step:
            why = f"the checkpoint of step {newest} is newer than the kept step {step}"
        if why:
            instead = "the newest checkpoint is loaded" if loads else "there is no checkpoint, and training begins anew"
            say(f"no kept step is taken: {why}; {instead}")
            step = None
        if step is None:
            self.kept.protect(None)
        self.kept.keep_config(config)
        if step is None:
            return loads
        load = manager.load

        def load_kept(context: Any) -> tuple[int, int]:
            manager.load = load
            if loads and any(not param.requires_grad for chunk in self._chunks for param in chunk.parameters()):
                load(context)
            self._go_on(context, step)
            return context.state.train_state.step, context.state.train_state.floating_point_operations_so_far

        manager.load = load_kept
        return True

    def _go_on(self, context: Any, step: int) -> None:
        """Take the kept step in the place of a checkpoint, unless frozen weights differ on any rank."""
        from megatron.bridge.training import fault_tolerance
        from megatron.core.num_microbatches_calculator import update_num_microbatches
        from megatron.core.rerun_state_machine import get_rerun_state_machine

        assert self.kept is not None
        started, engine, train_state = time.perf_counter(), self._engine, context.state.train_state
        contents = io.BytesIO(self.kept.found[step].small)
        small = pickle.load(contents)
        if not all(gather(small["frozen"] == self._frozen_sums)):
            say(f"no kept step is taken: frozen weights are not those that step {step} was trained with")
            self.kept.protect(None)
            return
        for source in engine.sources:
            _make_adams(source)
            engine.release_for_kept(source)
        self.kept.adopt()
        for source, leaf in zip(engine.sources, self._leaves, strict=True):
            engine.rewrite_weights(source, leaf._copy_main_params_to_model_params)
        for tensors, name in self._beside:
            target = tensors[name].data
            if data := bytearray(contents.read(target.nbytes)):
                target.copy_(torch.frombuffer(data, dtype=target.dtype).view(target.shape))
        for module, value in zip(self._extra, pickle.loads(small["extra"]), strict=True):
            module.set_extra_state(value)
        for chunk in self._chunks:
            if chunk.ddp_config.use_distributed_optimizer:
                chunk.start_param_sync(force_sync=True)  # each rank wrote its part
        context.opt_param_scheduler.load_state_dict(small["scheduler"])
        for leaf, saved in zip(self._leaves, small["optimizers"], strict=True):
            _load_optimizer(leaf, saved)
        train_state.load_state_dict(small["train_state"])
        update_num_microbatches(train_state.consumed_train_samples, verbose=True)
        if small["rerun"] is not None:
            small["rerun"]["sharded"] = small["rerun"]["sharded"].data  # as Bridge's load has it
            get_rerun_state_machine().load_state_dict(small["rerun"])
        fault_tolerance.on_checkpoint_loaded(is_local_chkpt=True, global_state=context.state)
        self.resumed, self.restored_step = small, step
        self.seconds |= {"page-lock": engine.pin_seconds, "go on": time.perf_counter() - started}
        parts = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self.seconds.items())
        say(f"training goes on from step {step}, which the crash left whole ({parts})")

    def iterators_made(self, iterators: Sequence[Any]) -> None:
        """Take the loaders' iterators, and have those that were being read be so again, where they were."""
        self._iterators = [one for each in iterators for one in (each if isinstance(each, list) else [each])]
        if self.resumed is None:
            return
        if self.resumed["data"] is not None:
            self._iterators[0].iterable.restore_state(self.resumed["data"])
        for iterator in itertools.compress(self._iterators, self.resumed["read"]):
            if (place := _unread(iterator)) is not None:  # torch draws a random number as a loader is begun
                generator = getattr(*place)
                setattr(*place, itertools.chain([next(generator)], generator))

    # A step.

    def begin_step(self, arguments: dict[str, Any]) -> None:
        """Begin the record of the step that has ended: a training step begins."""
        from megatron.core.rerun_state_machine import RerunState, get_rerun_state_machine

        if self.resumed is not None:
            _set_rng(self.resumed["rng"])
            self.resumed = None
            return  # there is a record of this step
        if self.kept is None:
            return
        if not self._is_set_up:
            raise ValueError(f"{SETTING}: Bridge's setup() has not set up this training, by which a start goes on")
        if self._line is not None and not self._line.is_alive():
            warn("the keeper has ended: a crash would cost all steps since the newest checkpoint")
            self._line = None
        states = (state for slab in self._engine.slabs for state in slab.states)
        self._is_whole = self._is_whole or all(state.read() is not None for state in states)
        is_quiet = get_rerun_state_machine().state is RerunState.NOT_RUNNING_YET
        if self._line is not None and self._is_whole and is_quiet:
            step, beside = arguments["global_state"].train_state.step, [tensors[name] for tensors, name in self._beside]
            self.kept.capture(step, _pickled(self._small_state(arguments)), beside)

    def _small_state(self, arguments: dict[str, Any]) -> dict[str, Any]:
        from megatron.bridge.training.checkpointing import get_rng_state
        from megatron.bridge.training.utils.pg_utils import get_pg_collection
        from megatron.core.rerun_state_machine import get_rerun_state_machine

        rng: Any = get_rng_state(False, "torch", pg_collection=get_pg_collection(arguments["model"]))
        save_data = getattr(getattr(next(iter(self._iterators), None), "iterable", None), "save_state", None)
        return {
            "train_state": arguments["global_state"].train_state.state_dict(),
            "scheduler": arguments["scheduler"].state_dict(),
            "rerun": get_rerun_state_machine().state_dict(arguments["data_iterator"], "torch_dist"),
            "rng": rng[0],
            "optimizers": list(map(_optimizer_state, self._leaves, self._entries)),
            "extra": self._extra_states,
            "frozen": self._frozen_sums,
            "data": save_data and save_data(),
            "read": [iterator is not None and _unread(iterator) is None for iterator in self._iterators],
        }

    @cached_property
    def _entries(self) -> list[list[tuple[int, str]]]:
        """Entries of each optimizer's `state` that no slab holds: the number of the parameter, and their name."""
        held = {id(tensor) for slab in self._engine.slabs for tensor in slab.tensors()}
        inner = [leaf.optimizer for leaf in self._leaves]
        states = [[each.state.get(param, {}) for param in _params(each)] for each in inner]
        return [[(n, name) for n, s in enumerate(each) for name in s if id(s[name]) not in held] for each in states]

    @cached_property
    def _extra_states(self) -> bytes:
        """Extra states, made once: Transformer Engine's waits for the GPU, and changes with delayed scaling alone."""
        return _pickled([module.get_extra_state() for module in self._extra])

    @cached_property
    def _frozen_sums(self) -> list[int]:
        frozen = (param.detach() for chunk in self._chunks for param in chunk.parameters() if not param.requires_grad)
        flat = [param.contiguous().view(-1).view(torch.uint8) for param in frozen]
        return byte_sums(flat).tolist() if flat else []

    def end_pass(self) -> None:
        """Write the record, and tell all ranks: a collective."""
        if self.kept is not None:
            self.kept.settle()
            self.kept.vote(torch.device("cuda" if torch.cuda.is_available() else "cpu"))

    def end_step(self, outcome: Any, state: Any) -> None:
        """Note what Bridge's step has returned: where it ends training, the next start is to have what it saves."""
        self._is_over = outcome[3] or state.train_state.step + 1 >= state.cfg.train.train_iters
        if self._is_over and self.kept is not None:
            self.kept.end_rounds()
        if outcome[3]:  # `should_exit`
            self.close()

    def close(self) -> None:
        """Erase the records of a training that is over: another one does not go on from them."""
        if self._is_over and self.kept is not None:
            self.kept.protect(None)
            self.kept = None


def begin_training(survival: Survival | None) -> Survival | None:
    """Have Bridge's setup, which knows no optimizer, ask this one from now on."""
    global _newest
    if _newest is not None:
        _newest.close()
    _newest = survival
    return survival


@atexit.register
def _end() -> None:
    if not hasattr(sys, "last_exc"):  # else an error ends the process, in the last save say
        begin_training(None)


# Wrappers of Bridge's setup.


def asks_for_checkpoint(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Have setup load a kept step in the place of a checkpoint."""
    arguments, loads = arguments_of(wrapped, args, kwargs), wrapped(*args, **kwargs)
    manager = arguments["checkpoint_manager"]
    return loads if _newest is None else _newest.is_to_load(arguments["cfg"], manager, loads)


def makes_iterators(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Have the loaders' iterators be as far as they were."""
    iterators = wrapped(*args, **kwargs)
    if _newest is not None:
        _newest.iterators_made(iterators)
    return iterators


def loads_data_state(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Leave out a checkpoint's state of the data after `makes_iterators` has set the kept one."""
    return None if _newest is not None and _newest.resumed is not None else wrapped(*args, **kwargs)


# Parts of the small state.


class _Pickler(pickle.Pickler):
    """Pickles the bytes of tensors alone: torch's own way takes the host as long as all the rest."""

    @override
    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return NotImplemented
        data = obj.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return _tensor, (data, obj.dtype, obj.shape, obj.device.type)


def _tensor(data: bytes, dtype: torch.dtype, shape: torch.Size, device: str) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(data), np.uint8)).view(dtype).view(shape).to(device)


def _pickled(value: Any) -> bytes:
    _Pickler(file := io.BytesIO(), protocol=5).dump(value)
    return file.getvalue()


def _tensors_beside(modules: Sequence[torch.nn.Module]) -> list[tuple[dict[str, Any], str]]:
    """Return where each tensor of the model is that is neither frozen nor the rounding of a master."""
    return [
        (tensors, name)
        for module in modules
        for tensors in (module._buffers, module._parameters)
        for name, tensor in tensors.items()
        if isinstance(tensor, torch.Tensor)
        and (tensors is module._buffers or (tensor.requires_grad and tensor.dtype == torch.float32))
    ]


def _params(inner: Any) -> list[Any]:
    return [param for group in inner.param_groups for param in group["params"]]


def _optimizer_state(leaf: Any, entries: Sequence[tuple[int, str]]) -> dict[str, Any]:
    inner, scaler = leaf.optimizer, getattr(leaf, "grad_scaler", None)
    params = _params(inner) if entries else []
    values: Any = [inner.state[params[number]][name] for number, name in entries]
    if {getattr(value, "shape", None) for value in values} == {torch.Size()}:
        values = torch.stack(values)  # torch's Adam has a count for each parameter
    return {
        "groups": [{name: value for name, value in group.items() if name != "params"} for group in inner.param_groups],
        "entries": (entries, values),
        "scaler": scaler and scaler.state_dict(),
    }


def _load_optimizer(leaf: Any, saved: dict[str, Any]) -> None:
    inner, params = leaf.optimizer, _params(leaf.optimizer)
    for group, values in zip(inner.param_groups, saved["groups"], strict=True):
        group.update(values)
    for (number, name), value in zip(*saved["entries"], strict=True):
        inner.state[params[number]][name] = value.clone() if isinstance(value, torch.Tensor) else value
    if saved["scaler"]:
        leaf.grad_scaler.load_state_dict(saved["scaler"])


def _make_adams(source: Any) -> None:
    """Make the moments of torch's Adam, which makes them in its first step alone."""
    inner = source.optimizer.optimizer
    for state in (state for bundle in source.states() for state in bundle.states if isinstance(inner, TORCH)):
        if state.late and state.read() is None:
            inner.state[state.param][state.name] = torch.zeros_like(state.param, dtype=state.dtype)


def _set_rng(saved: dict[str, Any]) -> None:
    """Set all random numbers as Bridge's load does; by the same config the tracker is of the same kind."""
    from megatron.core import tensor_parallel

    random.setstate(saved["random_rng_state"])
    np.random.set_state(saved["np_rng_state"])
    torch.set_rng_state(saved["torch_rng_state"])
    torch.cuda.set_rng_state(saved["cuda_rng_state"])
    tracker: Any = tensor_parallel.get_cuda_rng_tracker()
    tracker.set_states(saved["rng_tracker_states"])


def _unread(iterator: Any) -> tuple[Any, str] | None:
    """Return where the generator is that reads a loader, if it has not begun to.

    Bridge's `RerunDataIterator` has one to read a loader again and again, and Energon's loader has one of its own.
    """
    iterable = getattr(iterator, "iterable", None)
    for owner, name in ((iterator, "iterable"), (iterable, "_iter")):
        found = getattr(owner, name, None)
        if inspect.isgenerator(found) and inspect.getgeneratorstate(found) == inspect.GEN_CREATED:
            return owner, name
    return None


# The config that a kept step was trained with, and the one of this start.


def _described(cfg: Any, ranks: int) -> dict[str, str]:
    """Return, by "section.name" and in words, the settings and versions that a start must share with a kept step."""
    sections = {name: owner for name in PARTS if hasattr(owner := getattr(cfg, name, None), "__dict__")}
    found = {f"{name}.{each}": value for name, owner in sections.items() for each, value in settings_in(owner).items()}
    found |= {f"checkpoint.{name}": getattr(cfg.checkpoint, name, None) for name in OF_CHECKPOINT}
    found |= {name: version_of(name) for name in DISTRIBUTIONS} | {"ranks": ranks}
    found = {name: sorted(value, key=repr) if isinstance(value, set) else value for name, value in found.items()}
    words = {name: re.sub(r" at 0x[0-9a-f]+", "", repr(value)) for name, value in found.items()}
    return {name: value for name, value in words.items() if "._" not in name}  # those Bridge notes itself


def _difference(before: bytes, now: bytes) -> str:
    """Return the first difference of two configs in words; empty where there is none, or none before."""
    then, these = json.loads(before or now), json.loads(now)
    names = (name for name in sorted(then | these) if then.get(name) != these.get(name))
    return next((f"{name} was {then.get(name)} and is {these.get(name)}" for name in names), "")


def _newest_checkpoint(cfg: Any, manager: Any) -> int:
    """Return the step of the newest checkpoint that Bridge would load to go on; -1 where it has none."""
    from megatron.bridge.training import checkpointing

    checkpoint, folders = cfg.checkpoint, [cfg.checkpoint.load]
    local = getattr(manager, "checkpointing_context", {}).get("local_checkpoint_manager")
    if checkpoint.non_persistent_ckpt_type == "global":
        folders += checkpointing._get_global_non_persistent_checkpoint_dirs(checkpoint.load, checkpoint)
    found = [each for each in folders if each is not None and checkpointing.checkpoint_exists(each)]
    steps = [checkpointing._resolve_checkpoint_iteration(each, checkpoint.ckpt_step)[0] for each in found]
    return max([-1 if local is None else local.find_latest(), *steps])
