"""Bridge's own save and load of a CPU training, in the foreground and in the background."""

import dataclasses
from pathlib import Path

import torch
from both import bits, steps

FORMATS = ["fully_reshardable", "dp_reshardable"]


@dataclasses.dataclass
class Saved:
    """What a run saved after two steps, its bits then, what the next two steps reported, and the bits after those."""

    folders: dict
    bits: dict
    after: list
    end: dict

    def goes_on_in(self, run):
        """Fail where a training that has loaded it does not go on as it did."""
        skip_data_of(run, 2)
        assert steps(run, 2) == self.after
        assert bits(run) == self.end


def newest(folder: Path) -> Path:
    """The checkpoint that Bridge would resume from."""
    return folder / f"iter_{int((folder / 'latest_checkpointed_iteration.txt').read_text()):07d}"


def save(run, folder, kind="fully_reshardable", context=None):
    """Save through Bridge's `save_checkpoint`."""
    from megatron.bridge.training.checkpointing import save_checkpoint

    run.cfg.checkpoint.save = str(folder)
    run.cfg.checkpoint.dist_ckpt_optim_fully_reshardable = kind == "fully_reshardable"
    context = {} if context is None else context
    save_checkpoint(run.state, run.model, run.optimizer, run.scheduler, 0, checkpointing_context=context)


def load(run, folder, context=None):
    """Load through Bridge's `load_checkpoint`."""
    from megatron.bridge.training.checkpointing import load_checkpoint

    run.cfg.checkpoint.load = str(folder)
    context = {} if context is None else context
    load_checkpoint(run.state, run.model, run.optimizer, run.scheduler, checkpointing_context=context)


def skip_data_of(run, steps):
    """Take the microbatches of the steps that were trained before the save."""
    from megatron.core.num_microbatches_calculator import get_num_microbatches

    for _ in range(steps * get_num_microbatches()):
        next(run._batches)
    run._batches.advance()


def send_all_away():
    """Have every state leave the GPU, in what is offloaded."""
    from bridge_fgo.bridge.session import all_sessions

    for session in all_sessions():
        session.engine.offload_now()


def assert_same_shards(mine, theirs):
    """The tensor bytes on disk are equal; the padding of dp_reshardable, which mcore never fills, is not compared."""
    shards = [sorted(folder.rglob("*.distcp")) for folder in (mine, theirs)]
    assert [path.name for path in shards[0]] == [path.name for path in shards[1]] != []
    for ours, resident in zip(*shards, strict=True):
        assert ours.read_bytes() == resident.read_bytes()


def tensors_in(value, path=()):
    """Yield every tensor in a nested state dictionary, with its path."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, (dict, list, tuple)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from tensors_in(item, (*path, key))
    elif hasattr(value, "data"):
        yield from tensors_in(value.data, path)


def configured(run, **settings):
    """Set `section.name` of the run's config; written section__name."""
    for path, value in settings.items():
        section, name = path.split("__")
        assert hasattr(getattr(run.cfg, section), name), path
        setattr(getattr(run.cfg, section), name, value)


def background(run, worker, folder):
    """Have `save` hand checkpoints to a writer in a process of its own."""
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    checkpoint = run.cfg.checkpoint
    checkpoint.async_save, checkpoint.save = True, str(folder)
    checkpoint.async_strategy = "nvrx" if worker == "nvrx" else "mcore"
    if worker == "fork":
        run.state._async_calls_queue = AsyncCallsQueue(persistent=False)
    else:
        checkpoint.async_write_results_mp_mode = "spawn"
        run.state.initialize_async_checkpoint_worker()


def finish(run, terminate=True):
    """Wait for the writer, and end it."""
    from megatron.bridge.training.checkpointing import maybe_finalize_async_save

    maybe_finalize_async_save(run.state, run.cfg.checkpoint, blocking=True, terminate=terminate)
