"""Hands the figures of a step to the loggers that Bridge has on."""

from __future__ import annotations

from typing import Any


def log_scalars(scalars: dict[str, float], state: Any) -> None:
    """Write figures to TensorBoard and W&B, at the steps at which Bridge writes its own.

    Args:
        scalars: figures of the step that has just ended, by tag.
        state: Bridge's GlobalState; its step counter is advanced after the training step.
    """
    logger_config = getattr(state.cfg, "logger", None)
    interval = getattr(logger_config, "tensorboard_log_interval", None)
    if not isinstance(interval, int) or interval < 1:
        return
    iteration = state.train_state.step + 1
    if iteration % interval:
        return
    if state.tensorboard_logger:
        for tag, value in scalars.items():
            state.tensorboard_logger.add_scalar(tag, value, iteration)
    if state.wandb_logger:
        state.wandb_logger.log(scalars, iteration)
