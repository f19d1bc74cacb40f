"""Bridge's whole training loop, its real `train()`, around a CPU training."""

import gc
from dataclasses import dataclass, field


@dataclass
class Seen:
    """What a run of the loop showed, a value for each step or evaluation."""

    losses: list = field(default_factory=list)
    grad_norms: list = field(default_factory=list)
    params_norms: list = field(default_factory=list)
    """With `log_params_norm`."""
    held: list = field(default_factory=list)
    """The most bytes of live optimizer state as a forward of the step began."""
    evaluations: list = field(default_factory=list)
    held_in_evaluations: list = field(default_factory=list)

    @property
    def numbers(self):
        """What must not depend on the offload."""
        return self.losses, self.grad_norms, self.params_norms, self.evaluations


def train(run, until, each_step=lambda number: None, valid=None, callback=None):
    """Train through Bridge's `train` until `until` steps are done; return what was seen.

    run: a CpuTraining.
    each_step: called with the number of a step, from 1, before it.
    valid: iterator of microbatches to evaluate on.
    callback: a Callback of Bridge's, called before `each_step`.

    Where Bridge ends the process, SystemExit comes out.
    """
    from megatron.bridge.training import train as bridge
    from megatron.bridge.training.callbacks import CallbackManager
    from megatron.bridge.training.checkpointing import create_checkpoint_manager

    seen = Seen()

    def begin(context):
        run.steps = context.state.train_state.step + 1
        run._forwards, run.live_bytes = 0, []
        each_step(run.steps)

    def end(context):
        seen.losses.append({name: value.tolist() for name, value in context.loss_dict.items()})
        seen.grad_norms.append(context.grad_norm)
        seen.held.append(max(run.live_bytes))

    def end_evaluation(context):
        seen.evaluations.append({name: value.tolist() for name, value in context.total_loss_dict.items()})
        seen.held_in_evaluations.append(max(run.live_bytes))

    def norm(*args, **kwargs):
        seen.params_norms.append(original_norm(*args, **kwargs))
        return seen.params_norms[-1]

    def forward_step(data_iterator, model):
        return run._forward_step(data_iterator, model)  # looked up here, so that a test may replace it in mid-run

    callbacks = CallbackManager()
    if callback is not None:
        callbacks.add(callback)
    for event, function in (
        ("on_train_step_start", begin),
        ("on_train_step_end", end),
        ("on_eval_start", lambda context: run.live_bytes.clear()),
        ("on_eval_end", end_evaluation),
    ):
        callbacks.register(event, function)
    original_norm = bridge.calc_params_l2_norm
    before, run.cfg.train.train_iters = run.cfg.train.train_iters, until
    bridge.calc_params_l2_norm = norm
    try:
        bridge.train(
            forward_step, run.model, run.optimizer, run.scheduler, run._batches, valid, run.state,
            create_checkpoint_manager(run.cfg.checkpoint), run.groups, callback_manager=callbacks,
        )  # fmt: skip
    finally:
        run.cfg.train.train_iters = before  # the schedules of a resumed run are made from it
        bridge.calc_params_l2_norm = original_norm
        gc.enable()  # manual_gc turns it off for good
    return seen
