"""Bridge's own save and load of a CPU training."""

from pathlib import Path


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


def send_all_away():
    """Have every state leave the GPU, in what is offloaded."""
    from bridge_fgo.bridge.session import all_sessions

    for session in all_sessions():
        session.engine.offload_now()
