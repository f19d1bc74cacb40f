"""Offload and reload on one rank. No collective runs here, and no other rank takes part."""

from collections.abc import Sequence
from typing import Literal

from bridge_fgo.memory.storage_slab import find_aliases
from bridge_fgo.memory.undo import undo_on_error
from bridge_fgo.sleep.gradient_offloader import drop_shard_gradients
from bridge_fgo.sleep.moved import Moved, Tally, return_to_driver, wait_for_gpu
from bridge_fgo.sleep.selection import weights_of
from bridge_fgo.sleep.trainer_memory import TrainerMemory, Unit

Grads = Literal["drop", "keep"]  # whether an offload drops gradients, which a reload makes zeros, or copies them


def require_no_backward(memory: TrainerMemory, units: Sequence[Unit], grads: Grads) -> None:
    """Raise RuntimeError if an offload would drop gradients that no step has used."""
    if grads not in ("drop", "keep"):
        raise ValueError(f"grads={grads!r}: use 'drop' or 'keep'")
    if grads == "drop" and memory.gradients in units and memory.has_gradients:
        raise RuntimeError(
            "a backward has run since the last optimizer step, and offload() would drop its gradients: step, or "
            "zero them by each model chunk's zero_grad_buffer() (the optimizer's zero_grad() does not), or use "
            "offload(..., grads='keep')"
        )


def require_movable(memory: TrainerMemory, units: Sequence[Unit], grads: Grads) -> None:
    """Raise ValueError or RuntimeError if units cannot be offloaded; allocate host memory for kept gradients."""
    slabs, has_grads = weights_of(units), memory.gradients in units
    if slabs:
        memory.weights.require_known()
    for slab in (*slabs, *(memory.gradients.slabs if has_grads else ())):
        slab.require_resizable()
    if memory.states is not None and memory.states in units:
        memory.states.require_whole()
    if has_grads and grads == "keep":
        needed = memory.gradients.unmapped_bytes
        memory.budget.require("offload(grads='keep')", needed, "step or zero them before, or ")
        hosts = memory.gradients.map_hosts()
        memory.budget.left -= needed  # also if the lock fails: they stay mapped, to be locked by another call
        memory.lock(hosts)


def offload(memory: TrainerMemory, units: Sequence[Unit], grads: Grads, tally: Tally) -> Moved:
    """Offload units that are on the GPU."""
    states, slabs = memory.states if memory.states in units else None, weights_of(units)
    has_grads = memory.gradients in units
    drops, keeps = has_grads and grads == "drop", has_grads and grads == "keep"
    dropped = 0
    if drops and memory.states is not None:
        dropped = sum(drop_shard_gradients(leaf.optimizer) for leaf in memory.states.optimizers)
    find_aliases([*slabs, *(memory.gradients.slabs if has_grads else ())])  # after views of gradients went
    # Race: memory goes to the driver from here on, while work on some stream may still use what is cached.
    wait_for_gpu(memory.device)
    if drops:  # first: the driver takes their memory back while others are copied
        with tally.part("grads"):
            tally.moved.freed += dropped + memory.gradients.empty(kept=False)
            memory.backwards.used()

    def give_up() -> None:
        if states is not None:
            states.give_up_offload()
        # Race: weights that stay after all may be written while their copies still read them.
        wait_for_gpu(memory.device)

    with undo_on_error(give_up, memory.weights.masters_may_change):
        # Weights first: their copies run while masters are compared, and while the states' are queued.
        memory.weights.start_offload(slabs, states is not None, tally)
        if states is not None:
            before = states.engine.traffic.released + states.unmade_bytes
            with tally.part("optimizer"):
                tally.copy("optimizer", states.start_offload())
            if not states.reads_weights:  # while states are copied the driver takes these back too
                with tally.part("params"):
                    tally.moved.freed += memory.weights.release(slabs)
            with tally.part("optimizer"):
                states.end_offload()
            tally.moved.freed += states.engine.traffic.released - before
    if keeps:
        tally.copy("grads", memory.gradients.copy_out())
    # Race: an emptied storage goes to the next allocation on the stream that it was made on, and to the driver, while
    # copies on another stream still read it.
    with tally.part("wait"):
        wait_for_gpu(memory.device)
    tally.moved.freed += memory.weights.release(slabs)
    if keeps:
        tally.moved.freed += memory.gradients.empty(kept=True)
    with tally.part("driver"):
        return_to_driver(memory.device)
    with tally.part("caches"):
        tally.moved.caches = memory.caches.drop(memory.away, is_mid_step=memory.has_gradients)
    if tally.moved.caches:
        with tally.part("driver"):
            return_to_driver(memory.device)
    tally.note_what_stays(memory.unhosted)
    return tally.end()


def start_reload(memory: TrainerMemory, units: Sequence[Unit], tally: Tally) -> None:
    """Start to reload states and gradients; `end_reload` follows."""
    states = memory.states
    if states is not None and states in units:  # first: the driver gives memory for the others while these are copied
        before = states.engine.traffic.released
        with tally.part("optimizer"):
            tally.copy("optimizer", states.reload())
        tally.moved.freed += states.engine.traffic.released - before
    if memory.gradients in units:
        with tally.part("grads"):
            taken, copied = memory.gradients.reload()
        tally.moved.freed -= taken
        tally.copy("grads", copied)


def end_reload(memory: TrainerMemory, units: Sequence[Unit], tally: Tally) -> Moved:
    """Wait until all that was reloaded is there, for whatever stream reads it next."""
    with tally.part("wait"):
        if memory.states is not None and memory.states in units:
            memory.states.finish_reload()
        wait_for_gpu(memory.device)
    memory.weights.masters_reloaded(tally)
    return tally.end()
