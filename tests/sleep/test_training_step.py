"""A loop on mcore alone, with `Residency.training_step`, is bitwise as without."""

import contextlib
from dataclasses import fields, replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from both import PACKED
from cpu_training import CpuTraining
from megatron.core.optimizer.optimizer import ChainedOptimizer
from sleeping import KINDS, WHOLE, options, residency

import bridge_fgo
from bridge_fgo.bridge import activation_offload
from bridge_fgo.bridge.residency_settings import OF_TRAIN_STEP
from bridge_fgo.bridge.session import Session, active_session, attach
from bridge_fgo.engines.lease import lease_of
from bridge_fgo.memory.meters import ACTIVE, ALLOCATED, PeakMeter
from bridge_fgo.memory.transfers import Transfers

pytestmark = pytest.mark.usefixtures("cpu_standins", "poisoned")

CONFIGS = {"whole masters": None, "packed masters": PACKED, "small slabs": WHOLE}
MUON = {"distributed": False, "optimizer": "muon"}
IN_THE_FAST_LANE = ("dense", "experts", "fp16_with_skipped_steps", "collectives_in_flight")
SCENARIOS = {
    "dense": {},
    "experts": {"experts": True},
    "native_fp32_parameters": {"precision": "fp32_params"},
    "a_step_that_is_skipped": {"found_inf_steps": (3,)},
    "fp16_with_skipped_steps": {"precision": "fp16"},
    "collectives_in_flight": {"overlap_grad_reduce": True, "overlap_param_gather": True},
    "more_microbatches": {"microbatches": 4},
    "muon": MUON,
    "adam_that_is_not_distributed": {"distributed": False},
}


def zero(training):
    for chunk in training.model:
        chunk.zero_grad_buffer()
    training.optimizer.zero_grad()
    training.live_bytes = []


def passes(training, forwards=None):
    """Zero gradients, and run forward and backward of all microbatches by mcore's schedule; return the losses."""
    training.steps += 1
    training._forwards = 0
    zero(training)
    found = training._schedule(
        forward_step_func=forwards or training._forward_step,
        data_iterator=training._batches,
        model=training.model,
        num_microbatches=training.options.microbatches,
        seq_length=training.options.sequence,
        micro_batch_size=training.options.micro_batch_size,
        forward_only=False,
    )
    training._batches.advance()
    return [value.tolist() for losses in found for value in losses.values()]


def by_hand(training):
    """As `passes`, with no schedule: one microbatch, and DDP's own finish of gradients."""
    zero(training)
    output, loss = training._forward_step(training._batches, training.model[0])
    value, tokens, _ = loss(output)
    (value / tokens).backward()
    training.model[0].finish_grad_sync()
    return float(value)


def step(training, run=passes, context=contextlib.nullcontext):
    """Make a training step; return what it reported."""
    with context():
        losses = run(training)
        updated, norm, _ = training.optimizer.step()
    return losses, updated, norm


def trained(steps, run=passes, context_of=lambda training: contextlib.nullcontext, **changes):
    with CpuTraining(options(**changes)) as training:
        context = context_of(training)
        seen = [step(training, run, context) for _ in range(steps)]
        for lease in filter(None, map(lease_of, training.optimizer.chained_optimizers)):
            lease.engine.require_writable()
        for ddp in training.model if training.options.distributed else ():
            ddp.start_param_sync(force_sync=True)
        return seen, training.digests()


def driven(held, training, config=None, **count):
    """Return the context of a training step, which notes in `held` the most bytes of state in a forward."""
    res = residency(training, config=config)

    @contextlib.contextmanager
    def context():
        with res.training_step(**count):
            yield
        held.append(max(training.live_bytes))

    return context


@pytest.mark.parametrize(
    ("changes", "config"),
    [
        pytest.param(
            changes, config, id=f"{name}-{settings}",
            marks=() if settings == "packed masters" and name in IN_THE_FAST_LANE else pytest.mark.slow,
        )
        for name, changes in SCENARIOS.items() for settings, config in CONFIGS.items()
    ],
)  # fmt: skip
@pytest.mark.usefixtures("installed")
def test_a_loop_of_ones_own_is_bitwise_a_resident_one_with_no_state_held_in_its_passes(changes, config):
    held = []
    count = {"microbatches": changes["microbatches"]} if "microbatches" in changes else {}
    seen = trained(5, context_of=partial(driven, held, config=config, **count), **changes)
    assert seen == trained(5, **changes)
    assert held == [0] * 5
    assert len({str(losses) for losses, *_ in seen[0]}) == 5
    if "found_inf_steps" in changes:
        assert [updated for _, updated, _ in seen[0]] == [True, True, False, True, True]


@pytest.mark.usefixtures("installed")
def test_a_loop_without_a_schedule_gets_its_states_back_as_ddp_finishes_gradients():
    held, found = [], []

    def noted(training):
        result = by_hand(training)
        found.append(training.live_state_bytes())
        return result

    seen = trained(4, run=noted, context_of=partial(driven, held))
    assert held == [0] * 4 and min(found[1:]) > 0
    assert seen == trained(4, run=by_hand)


@pytest.mark.usefixtures("installed")
def test_a_loop_of_ones_own_has_short_pieces_and_the_waits_that_activation_offload_lacks(monkeypatch, capsys):
    limits = []
    monkeypatch.setattr(Transfers, "limit_pieces", lambda self, piece_bytes: limits.append(piece_bytes))
    with CpuTraining(options()) as training:
        res = residency(training)
        with pytest.raises(ValueError, match="has a Residency already"):
            residency(training, config=bridge_fgo.OffloadConfig(activation_waits=True))
        assert not activation_offload._are_added
        with res.training_step():
            assert activation_offload._are_added and not limits
        lease, offloads = res._memory.states.lease, SimpleNamespace(fine_grained_activation_offloading=True)
        assert lease.meter.of_intervals == ALLOCATED
        lease.settings = replace(WHOLE, gpu_memory_budget_gib="auto")
        Session(lease, offloads)
        assert lease.meter.of_intervals == ACTIVE, "what is copied out has its memory still"
        assert limits == [activation_offload.PIECE_BYTES]
        assert "the waits that mcore's copies of activations lack are added" in capsys.readouterr().out


@pytest.mark.usefixtures("installed")
def test_training_steps_and_sleeps_alternate_and_change_no_bit(sleeper):
    expected = trained(5)
    me, seen = sleeper(0), []
    res, training = me.res, me.training

    def nested(training):
        with pytest.raises(RuntimeError, match="inside of a training step"), res.training_step():
            pytest.fail("nested")
        return passes(training)

    for number in range(5):
        seen.append(step(training, nested, res.training_step))
        assert res.away <= {"optimizer"}
        me.own = me.weights()
        me.offload("params")
        me.read_asleep()  # also where the step has left states on the host
        first = me.offload()
        assert res.away == set(KINDS) and training.live_state_bytes() == 0
        assert res.offload().freed == 0 < first.freed
        with pytest.raises(RuntimeError, match=r"call reload\('params'\)"), res.training_step():
            pytest.fail("asleep")
        if number % 2:
            res.reload()
        else:
            res.reload("params", "grads")  # the step brings the states itself
    stats = bridge_fgo.stats()
    assert stats is not None and stats.steps == 5 and stats.released_bytes == stats.offloaded_bytes > 0
    res.close()
    assert lease_of(me.leaf) is None and training.live_state_bytes() > 0
    assert (seen, training.digests()) == expected


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("where", ["before forward", "in a forward", "after backward"])
def test_an_error_in_the_block_loses_no_state_and_the_next_block_works(where):
    def fails(training):
        def forward(*args):
            raise ZeroDivisionError

        if where == "in a forward":
            passes(training, forward)
        elif where == "after backward":
            passes(training)
        raise ZeroDivisionError

    def with_errors(context_of, training):
        context = context_of(training)
        for number in range(4):
            if number == 2:
                with pytest.raises(ZeroDivisionError), context():
                    fails(training)
                assert active_session() is None
            yield step(training, context=context)

    ends = []
    for context_of in (lambda training: contextlib.nullcontext, lambda training: residency(training).training_step):
        with CpuTraining(options()) as training:
            seen = list(with_errors(context_of, training))
            bridge_fgo.reload_states()
            ends.append((seen, training.digests()))
    assert ends[0] == ends[1]


def test_what_cannot_drive_a_step_and_settings_that_would_not_count_are_refused_by_name(sleeper):
    def refused(res, error, match, *count):
        with pytest.raises(error, match=match), res.training_step(*count):
            pytest.fail("not refused")

    me = sleeper(0)
    refused(me.res, RuntimeError, r"call bridge_fgo\.install\(\) first")
    refused(me.res, ValueError, "microbatches=0", 0)
    me.res.close()
    alone = bridge_fgo.Residency(me.training.model)
    refused(alone, ValueError, "optimizer=None")
    alone.close()
    with bridge_fgo.install(bridge_fgo.OffloadConfig(engine="native")):
        me = sleeper(0, flag=bridge_fgo.OffloadConfig(engine="native"))
        refused(me.res, ValueError, r"optimizer\.offload_optimizer_states=True: Bridge's train_step")
        me.train()


@pytest.mark.parametrize("flag", [None, WHOLE])
def test_an_optimizer_that_has_a_residency_is_refused_to_another_one_and_to_a_training(sleeper, flag):
    me = sleeper(0, flag=flag)
    optimizer, chain, another = me.training.optimizer, ChainedOptimizer([me.leaf]), torch.nn.Linear(3, 2)

    def both_are_refused():
        with pytest.raises(ValueError, match=r"the optimizer has a Residency already.*close\(\) that one first"):
            bridge_fgo.Residency(torch.nn.Linear(3, 2), optimizer)
        with pytest.raises(ValueError, match=r"the optimizer has a Residency already.*close\(\) that one first"):
            attach(chain, me.ddp.config, WHOLE, me.training.model)

    with contextlib.closing(me.res):
        both_are_refused()
    with contextlib.closing(bridge_fgo.Residency(another, optimizer)):
        both_are_refused()
    me.train()


OTHER = {
    "moments": False, "master_weights": False, "master_remainders": True, "fraction": 0.5, "slab_bytes": 2**21,
    "piece_bytes": 2**20, "pin_memory": False, "gpu_memory_budget_gib": 1.0, "gradients": "lazy", "measure": True,
    "activation_waits": True, "engine": "mcore", "host_memory_gib": 1.0, "survive_crash": True,
    "nvme_folder": "disk",
}  # fmt: skip
"""A value of each setting that is not its default, but of `copies_to_buddy_every`, which needs `survive_crash`."""
HONOURED = {  # once the package is installed
    "an engine of its own": OTHER.keys() - {"measure", "engine", *OF_TRAIN_STEP},
    "no optimizer": {"pin_memory", "activation_waits"},
    "the flag's engine": {"activation_waits"},
}


@pytest.mark.parametrize("case", HONOURED)
def test_a_setting_is_honoured_or_refused_by_name_with_its_value(sleeper, monkeypatch, case):
    config = bridge_fgo.OffloadConfig
    assert {field.name for field in fields(config)} == OTHER.keys() | {"copies_to_buddy_every"}
    monkeypatch.setattr(PeakMeter, "works", True)
    has_flag = case == "the flag's engine"
    with bridge_fgo.install(WHOLE):
        me = sleeper(0, flag=WHOLE if has_flag else None)
        optimizer = None if case == "no optimizer" else me.training.optimizer
        accepted = [config(), *(config(**{name: OTHER[name]}) for name in HONOURED[case])]
        for each in [*accepted, WHOLE] if has_flag else accepted:  # defaults are no mistake, nor is what is in force
            bridge_fgo.Residency(me.training.model, optimizer, each).close()
        for name in OTHER.keys() - HONOURED[case]:
            with pytest.raises(ValueError, match=rf"{name}={OTHER[name]!r}\W.*; "):
                bridge_fgo.Residency(me.training.model, optimizer, config(**{name: OTHER[name]}))


@pytest.mark.parametrize("name", OTHER)
def test_settings_given_to_install_count_without_a_config_or_are_refused_by_name(sleeper, monkeypatch, name):
    monkeypatch.setattr(PeakMeter, "works", True)
    model, optimizer = (training := sleeper(0).training).model, training.optimizer
    given = bridge_fgo.OffloadConfig(**{name: OTHER[name]})
    with bridge_fgo.install(given):
        bridge_fgo.Residency(model).close()
        if name in ("engine", *OF_TRAIN_STEP):
            with pytest.raises(ValueError, match=rf"{name}={OTHER[name]!r}\W.*; leave it out"):
                bridge_fgo.Residency(model, optimizer)
        else:
            with contextlib.closing(bridge_fgo.Residency(model, optimizer)) as res:
                (lease,) = {lease_of(leaf) for leaf in optimizer.chained_optimizers}
                in_force = replace(given, engine="native", master_remainders=name == "master_remainders")
                assert lease.engine.config == lease.settings == in_force
                res.offload("optimizer")
        with bridge_fgo.Residency(model, optimizer, bridge_fgo.OffloadConfig()).asleep():
            pass  # a config of its own is what counts


def test_settings_that_are_installed_after_the_residency_was_made_are_no_surprise_to_its_steps(sleeper):
    res = sleeper(0).res
    with (
        bridge_fgo.install(bridge_fgo.OffloadConfig(fraction=0.5)),
        pytest.raises(ValueError, match=r"made with .*fraction=1\.0.*fraction=0\.5.*close\(\) it"),
        res.training_step(),
    ):
        pytest.fail("not refused")


def test_a_package_that_is_installed_after_the_residency_serves_its_steps_and_may_go_in_between(sleeper):
    expected = trained(4)
    me, seen = sleeper(0), []
    res, training = me.res, me.training
    for _ in range(2):
        with bridge_fgo.install(bridge_fgo.OffloadConfig(engine="native")):
            seen.append(step(training, context=res.training_step))
            assert max(training.live_bytes) == 0
            res.offload("optimizer")
            assert res.away == {"optimizer"}
        assert res.away == set()  # an uninstall makes states resident
        seen.append(step(training))
    assert (seen, training.digests()) == expected


def test_an_uninstall_leaves_masters_whose_weights_were_changed_with_their_residency(capsys):
    expected = trained(3)
    with CpuTraining(options()) as training:
        with bridge_fgo.install():
            res = residency(training, config=PACKED)
            seen = [step(training, context=res.training_step) for _ in range(2)]
            res.offload("optimizer")
            weight = next(training.model[0].parameters()).detach().view(-1)
            kept = weight[:1].clone()
            weight[:1] += 1
        assert res.away == {"optimizer"}
        assert capsys.readouterr().out.count("stays off the GPU with its Residency") == 1
        with pytest.raises(RuntimeError, match=r"call reload\('optimizer'\) first"):
            training.optimizer.step()
        with pytest.raises(RuntimeError, match="weights of the model were changed"):
            res.reload()
        weight[:1] = kept
        res.close()
        seen.append(step(training))
        assert (seen, training.digests()) == expected
