"""An arm of `bridge_fgo.tools.arms.gpu` whose training steps are driven by `Residency.training_step`, without the flag.

    python -m loop_arm --layers 16 --steps 20 --events FILE

Bridge's `train_step` is the loop of one's own: nothing else of the package drives it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bridge_fgo.tools.arms import gpu


def drive(train: Any, config: Any = None) -> Callable[[], None]:
    """Puts the context around each step of the module that has `train_step`; returns what undoes that.

    Args:
        train: the module.
        config: settings of the offload.
    """
    import bridge_fgo

    step = train.train_step
    residencies: dict[int, Any] = {}

    def driven(
        forward_step: Any, data: Any, model: Any, optimizer: Any, scheduler: Any, state: Any, *others: Any
    ) -> Any:
        from megatron.core.num_microbatches_calculator import get_num_microbatches

        if id(optimizer) not in residencies:
            residencies[id(optimizer)] = bridge_fgo.Residency(model, optimizer, config)
        with residencies[id(optimizer)].training_step(get_num_microbatches()):
            return step(forward_step, data, model, optimizer, scheduler, state, *others)

    def undo() -> None:
        train.train_step = step

    train.train_step = driven
    return undo


def main(arguments: list[str] | None = None) -> None:
    """Runs the arm."""
    from bridge_fgo.tools.arms.process_setup import make_deterministic, use_one_rank_by_default

    use_one_rank_by_default()
    if gpu.parse(arguments).deterministic:
        make_deterministic()
    import bridge_fgo

    bridge_fgo.install()
    from megatron.bridge.training import train

    drive(train, bridge_fgo.OffloadConfig(engine="native"))
    gpu.main(arguments)


if __name__ == "__main__":
    main()
