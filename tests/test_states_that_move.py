"""States that change places, share memory or are read by several threads train on bitwise, with their views."""

import dataclasses
import gc
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
import torch
from both import OPTIMIZERS, PACKED, WHOLE, both, exact, inner, masters, release, steps, training

from bridge_fgo.bridge.session import SESSION
from bridge_fgo.memory.gradient_bucket import GradientBucket
from bridge_fgo.memory.slab import StillShared

pytestmark = pytest.mark.usefixtures("cpu_standins")

RAN_ON = "CPU"
PAIRS = [(0, 3), (1, 2), (5, 17), (6, 18), (9, 11), (10, 22)]  # within a slab, and of slabs that hold one state each


def entries(run):
    adam = inner(run)
    return [adam.state[p] for group in adam.param_groups for p in group["params"]]


def states(run):
    return [*masters(run), *(entry[name] for entry in entries(run) for name in ("exp_avg", "exp_avg_sq"))]


def exchange_masters(run):
    found = masters(run)
    for i, j in PAIRS:
        found[i].data, found[j].data = found[j].data, found[i].data


def exchange_moments(run):
    found = entries(run)
    for one, other in [(found[11], found[12]), (found[1], found[2]), (found[4], found[9])]:
        one["exp_avg"], other["exp_avg"] = other["exp_avg"], one["exp_avg"]


def exchange_moments_between_slabs(run):
    """As after a touch, which reloads the slab of one of them alone."""
    for i, j in ((0, 8), (3, 7)):
        one, other = entries(run)[i], entries(run)[j]
        one["exp_avg"], other["exp_avg"] = other["exp_avg"], one["exp_avg"]


def exchange_both_moments(run):
    for entry in entries(run):
        entry["exp_avg"], entry["exp_avg_sq"] = entry["exp_avg_sq"].abs_(), entry["exp_avg"].abs_()


def rotate_masters(run):
    of_size = {}
    for master in masters(run):
        of_size.setdefault(master.shape, []).append(master)
    for group in of_size.values():
        first = group[0].data
        for one, other in pairwise(group):
            one.data = other.data
        group[-1].data = first


CHANGES = [exchange_masters, exchange_moments, exchange_moments_between_slabs, exchange_both_moments, rotate_masters]


@pytest.mark.parametrize("config", [WHOLE, PACKED], ids=["whole", "packed"])
@pytest.mark.parametrize("change", CHANGES)
def test_states_that_change_places_keep_their_values(change, config):
    def act(run):
        run.offloads_all = False  # what has changed places may be touched in a forward
        steps(run, 2)
        change(run)
        return steps(run, 2)

    both(act, config)


def flag_off_and_on(run):
    for is_set in (False, True):
        if run.options.offload:
            run.cfg.optimizer.offload_optimizer_states = is_set
        steps(run, 1)


def one_tensor_for_all_masters(run):
    found = masters(run)
    flat = torch.cat([master.detach().view(-1) for master in found])
    for master, part in zip(found, flat.split([master.numel() for master in found]), strict=True):
        master.data = part.view(master.shape)
    run.views = [master.detach().view(-1)[:3] for master in found]


def numpy_has_looked(run):
    run.seen = [np.asarray(master.detach()) for master in masters(run)]


@pytest.mark.parametrize("options", [{}, OPTIMIZERS["muon"]], ids=["Adam", "Muon"])
@pytest.mark.parametrize("change", [flag_off_and_on, one_tensor_for_all_masters, numpy_has_looked])
def test_views_that_are_kept_follow_states_that_share_memory(change, options):
    def act(run):
        run.offloads_all = False  # what has changed places may be touched in a forward
        steps(run, 2)
        run.views = [state.detach().view(-1)[:3] for state in masters(run)]
        change(run)
        steps(run, 1)
        seen = [view.sum().item() for view in run.views]
        with torch.no_grad():
            for view in run.views:
                view.mul_(0.9)
        return seen, steps(run, 2)

    both(act, PACKED, **options)


def numpy_has_looked_at_one(run):
    run.seen = np.asarray(masters(run)[1].detach())


HIDING = [flag_off_and_on, exchange_masters, exchange_moments, one_tensor_for_all_masters, numpy_has_looked_at_one]


@pytest.mark.parametrize("change", HIDING)
def test_a_view_that_gc_freeze_hides_is_an_error_wherever_states_would_move_away_from_it(change):
    with training(True, WHOLE) as run:
        run.offloads_all = False
        steps(run, 2)
        gc.freeze()
        try:
            flag_off_and_on(run)  # what is frozen are states, and each is found
            run.hidden = [state.view(-1)[:3] for state in states(run)]
            gc.freeze()
            with pytest.raises(StillShared, match=r"call gc\.unfreeze\(\)"):
                change(run)
                steps(run)
        finally:
            gc.unfreeze()


@pytest.mark.parametrize("is_held", [True, False])
def test_a_tensor_that_several_states_are_parts_of_is_an_error_if_somebody_holds_it(is_held):
    def act(run):
        run.offloads_all = False
        steps(run, 2)
        some = [(entry, name) for entry in entries(run)[:3] for name in ("exp_avg", "exp_avg_sq")]
        flat = torch.cat([entry[name].view(-1) for entry, name in some])
        for (entry, name), part in zip(some, flat.split([entry[name].numel() for entry, name in some]), strict=True):
            entry[name] = part.view(entry[name].shape)  # in C++ each holds `flat`
        held = [flat] if is_held else []
        del flat
        return steps(run, 2), exact(held)

    if is_held:
        with training(True, WHOLE) as run, pytest.raises(StillShared, match=r"spans it and other.*\.data\.clone\(\)"):
            act(run)
    else:
        both(act, WHOLE)


def test_a_view_of_a_state_that_is_not_contiguous_is_an_error_and_its_clone_trains_on():
    with training(True, WHOLE, **OPTIMIZERS["muon"]) as run:
        steps(run, 2)
        state = next(master for master in masters(run) if master.dim() == 2)
        state.data = state.data.t().contiguous().t()
        row = state.detach()[1]
        with pytest.raises(StillShared, match="that is not contiguous"):
            release(run)
        state.data = state.data.clone().contiguous()
        del row
        release(run)


@pytest.mark.parametrize("config", [WHOLE, PACKED], ids=["whole", "packed"])
def test_threads_that_read_states_at_once_between_steps_all_find_them(config):
    def act(run):
        seen = []
        for _ in range(3):
            seen.append(steps(run, 1))
            with ThreadPoolExecutor(6) as threads:
                seen.append(list(threads.map(lambda state: state.double().sum().item(), states(run) * 2)))
        assert not run.options.offload or SESSION in vars(run.optimizer)
        return seen

    both(act, config)


@pytest.mark.parametrize("use", ["through the parameter", "by views that are held"])
@pytest.mark.parametrize("gradients", ["lazy", True])
def test_threads_that_add_to_gradients_of_a_bucket_at_once_lose_nothing(monkeypatch, gradients, use):
    allocate = GradientBucket.allocate

    def slowly(bucket):
        allocate(bucket)
        time.sleep(0.01)  # before it is zeroed, which would lose what another thread had added meanwhile

    monkeypatch.setattr(GradientBucket, "allocate", slowly)

    def act(run):
        seen, params = [], [p for chunk in run.model for p in chunk.parameters() if p.requires_grad]
        held = [param.main_grad for param in params] if use != "through the parameter" else []

        def add(number):
            (held[number] if held else params[number].main_grad).add_(number)

        for _ in range(2):
            seen.append(steps(run, 1))
            for chunk in run.model:
                chunk.zero_grad_buffer()  # freed, if they are managed
            with ThreadPoolExecutor(6) as threads:
                list(threads.map(add, range(len(params))))
            seen.append([param.main_grad.double().sum().item() for param in params])
        return seen

    both(act, dataclasses.replace(WHOLE, gradients=gradients), overlap_grad_reduce=True)


@pytest.mark.parametrize("config", [{"fraction": 0.5}, {"host_memory_gib": 0.0004}, {}], ids=["half", "gaps", "all"])
def test_entries_of_the_optimizers_state_are_in_the_order_of_parameters(config):
    def act(run):
        run.offloads_all = False
        steps(run, 2)
        numbers = {id(param): number for number, param in enumerate(masters(run))}
        return [numbers.get(id(param), param.shape) for param in inner(run).state]

    both(act, dataclasses.replace(WHOLE, **config))


@pytest.mark.parametrize("options", [{}, OPTIMIZERS["muon"]], ids=["Adam", "Muon"])
@pytest.mark.parametrize("trouble", ["rerun_steps", "grad_norm_skip_steps"])
def test_states_that_code_takes_out_before_a_second_step_that_is_rerun_or_skipped_train_on(trouble, options):
    def act(run):
        run.offloads_all = False  # what was taken out stays on the GPU
        steps(run, 1)
        run.kept = [dict(entry) for entry in entries(run)]
        inner(run).state.clear()
        return steps(run, 3), run.kept

    both(act, WHOLE, **options, **{trouble: frozenset({2})})
