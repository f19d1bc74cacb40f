"""The native engine on a real AdamW in host memory: bits, bytes and identity."""

import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from fake_optimizer import make_distributed_optimizer, state_bytes, step, with_model
from fake_training import use_small_parts
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from bridge_fgo.config import OffloadConfig
from bridge_fgo.engines import native, ranks
from bridge_fgo.engines.native import NativeEngine
from bridge_fgo.memory.host_memory import Pool
from bridge_fgo.memory.meters import PeakMeter
from bridge_fgo.memory.slab import SlabState
from bridge_fgo.memory.transfers import HostTransfers
from bridge_fgo.offload.debug import VARIABLE
from bridge_fgo.offload.profile import Mark
from bridge_fgo.states.distributed import MegatronSource, bundles, home_device, live_bytes

SIZES = [1000, 3, 70_000, 256, 400_000, 12, 64]
MIB = 2**20


def make(config=None, **kwargs):
    optimizer = make_distributed_optimizer(SIZES, **kwargs)
    config = config or OffloadConfig(engine="native", slab_bytes=MIB, piece_bytes=65536)
    return optimizer, NativeEngine([MegatronSource(optimizer)], config, PeakMeter())


def live(optimizer):
    return live_bytes(bundles(optimizer), home_device(optimizer))


def one_pass(engine):
    engine.begin_pass()
    engine.release()
    engine.reload()
    engine.require_writable()
    return engine.traffic.most_released


def residencies(engine):
    return [slab.state for slab in engine.slabs]


def test_a_host_that_cannot_hold_the_states_of_all_optimizers_is_refused_before_anything_is_pinned(monkeypatch):
    config = OffloadConfig(engine="native")
    nbytes = sum(slab.nbytes for slab in make(config)[1].slabs)
    locked = []
    monkeypatch.setattr(MegatronSource, "device", torch.device("cuda"))
    monkeypatch.setattr(native.Remainders, "ready", lambda remainders: None)
    monkeypatch.setattr("bridge_fgo.engines.offloaded_source.local_cpus", lambda device: None)
    monkeypatch.setattr(
        "bridge_fgo.engines.offloaded_source.page_lock",
        lambda buffers, _: locked.append(sum(b.tensor.nbytes for b in buffers)),
    )
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)

    def attach(count, host_bytes):
        monkeypatch.setattr(ranks, "pools", lambda: [Pool("host", host_bytes, host_bytes)])
        sources = [MegatronSource(make_distributed_optimizer(SIZES)) for _ in range(count)]
        engine = NativeEngine(sources, config, PeakMeter(), transfers=HostTransfers(config.piece_bytes))
        assert engine.bytes_to_pin == count * nbytes
        ranks.pin_on_every_rank(engine)

    with pytest.raises(ValueError, match="host memory"):
        attach(1, nbytes - 1)
    assert locked == []
    attach(1, nbytes)
    with pytest.raises(ValueError, match=rf"pins {2 * nbytes} bytes of host memory for rank 0"):
        attach(2, 2 * nbytes - 1)
    assert locked == [nbytes]
    attach(2, 2 * nbytes)
    assert locked == [nbytes, 2 * nbytes]


def test_states_in_host_memory_are_not_pinned():
    engine = make()[1]
    engine.pin()
    assert engine.bytes_to_pin == engine.pinned_bytes == engine.pin_seconds == 0


def test_masters_go_before_the_first_step_and_moments_after_it():
    optimizer, engine = make()
    masters = 4 * sum(SIZES)
    assert one_pass(engine) == masters
    step(optimizer, 1)
    assert one_pass(engine) == 3 * masters


def test_twenty_steps_are_bitwise_equal_to_resident():
    resident = make_distributed_optimizer(SIZES, fp32_views=2)
    optimizer, engine = make(fp32_views=2)
    for seed in range(20):
        step(resident, seed)
        one_pass(engine)
        step(optimizer, seed)
    assert state_bytes(optimizer) == state_bytes(resident)


def test_released_states_hold_no_memory():
    optimizer, engine = make()
    step(optimizer, 1)
    engine.begin_pass()
    engine.release()
    assert live(optimizer) == 0
    assert set(residencies(engine)) == {SlabState.RELEASED}


def test_at_the_end_of_a_training_step_what_is_coming_has_come_and_the_rest_stays_away():
    optimizer, engine = make()
    step(optimizer, 1)
    engine.begin_pass()
    engine.release()
    engine.slabs[0].reload()
    engine.settle()
    assert residencies(engine) == [SlabState.RESIDENT, *[SlabState.RELEASED] * (len(engine.slabs) - 1)]


def test_views_of_the_ddp_buffer_are_never_moved():
    optimizer, engine = make(fp32_views=3)
    step(optimizer, 1)
    buffer = optimizer.buffers[0].param_data
    before = buffer.clone()
    views = optimizer.optimizer.param_groups[0]["params"][:3]
    engine.begin_pass()
    engine.release()
    for index, view in enumerate(views):
        assert view.data_ptr() == buffer.data_ptr() + 32 * index
        assert optimizer.optimizer.state[view]["exp_avg"].untyped_storage().nbytes() == 0  # its moments went
    assert torch.equal(buffer, before)


def test_tensors_keep_their_identity_and_attributes():
    optimizer, engine = make()
    step(optimizer, 1)
    masters = optimizer.shard_fp32_from_float16_groups[0]
    masters[0].tensor_model_parallel = True
    moment = optimizer.optimizer.state[masters[0]]["exp_avg"]
    before = moment.clone()
    one_pass(engine)
    assert optimizer.optimizer.param_groups[0]["params"][0] is masters[0]
    assert masters[0].tensor_model_parallel
    assert optimizer.optimizer.state[masters[0]]["exp_avg"] is moment
    assert torch.equal(moment, before)


def test_asking_for_a_state_does_not_make_an_entry():
    # TE's FusedAdam and torch's Adam take an existing empty entry for an initialised one.
    optimizer, engine = make()
    one_pass(engine)
    assert not optimizer.optimizer.state


def test_tensors_that_a_load_replaced_are_taken_in_again():
    optimizer, engine = make()
    step(optimizer, 1)
    one_pass(engine)
    param = optimizer.shard_fp32_from_float16_groups[0][2]
    loaded = torch.randn(param.shape)
    optimizer.optimizer.state[param]["exp_avg"] = loaded.clone()
    engine.begin_pass()
    engine.release()
    assert live(optimizer) == 0
    engine.require_readable()
    assert torch.equal(optimizer.optimizer.state[param]["exp_avg"], loaded)


def load_state_dict(optimizer):
    """Load a copy of the state as torch and mcore do: the dictionary and every tensor in it are replaced."""
    state = copy.deepcopy(optimizer.optimizer.state_dict())
    optimizer.optimizer.load_state_dict(state)


def test_states_of_a_load_before_the_first_step_go_too():
    trained = make_distributed_optimizer(SIZES)
    step(trained, 1)
    optimizer, engine = make()
    one_pass(engine)
    optimizer.optimizer.load_state_dict(copy.deepcopy(trained.optimizer.state_dict()))
    assert one_pass(engine) >= 3 * 4 * sum(SIZES)
    engine.begin_pass()
    engine.release()
    assert live(optimizer) == 0


def test_states_of_a_load_in_mid_run_go_and_the_old_ones_memory_too():
    resident = make_distributed_optimizer(SIZES)
    optimizer, engine = make()
    for seed in range(3):
        step(resident, seed)
        engine.require_writable()
        step(optimizer, seed)
        one_pass(engine)
        engine.require_writable()
        load_state_dict(optimizer)
        engine.states_replaced(*engine.sources)
        late = [slab for slab in engine.slabs if slab.states[0].late]
        assert late and all(slab.gpu_bytes == 0 for slab in late), "memory of tensors that nobody holds"
        engine.begin_pass()
        engine.release()
        assert live(optimizer) == 0
        engine.reload()
    engine.require_readable()
    assert state_bytes(optimizer) == state_bytes(resident)


def test_memory_that_a_writer_shares_is_left_to_the_writer():
    resident = make_distributed_optimizer(SIZES)
    optimizer, engine = make()
    for seed in range(3):
        step(resident, seed)
        one_pass(engine)
        step(optimizer, seed)
        if seed == 1:
            one_pass(engine)
            shared = optimizer.shard_fp32_from_float16_groups[0][2].numpy()
            saved = shared.tobytes()
    engine.begin_pass()
    engine.release()
    assert live(optimizer) == 0
    engine.require_readable()
    assert state_bytes(optimizer) == state_bytes(resident)
    assert shared.shape == (SIZES[2],) and len(saved) == shared.nbytes


def test_a_load_of_another_dtype_is_an_error_and_loses_nothing():
    optimizer, engine = make()
    step(optimizer, 1)
    one_pass(engine)
    param = optimizer.shard_fp32_from_float16_groups[0][2]
    optimizer.optimizer.state[param]["exp_avg"] = torch.ones(param.shape, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="exp_avg"):
        engine.begin_pass()
    assert torch.equal(optimizer.optimizer.state[param]["exp_avg"], torch.ones(param.shape, dtype=torch.float64))


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.9])
def test_fraction_releases_that_share_of_the_bytes(fraction):
    config = OffloadConfig(engine="native", fraction=fraction, slab_bytes=MIB)
    optimizer, engine = make(config)
    step(optimizer, 1)
    total = live(optimizer)
    freed = one_pass(engine)
    assert freed >= fraction * total
    assert "fraction" in engine.resident_note()


def test_only_moments_or_only_masters_go_when_asked():
    for config, share in ((OffloadConfig(master_weights=False), 2), (OffloadConfig(moments=False), 1)):
        optimizer, engine = make(config)
        step(optimizer, 1)
        freed = one_pass(engine)
        assert freed == share * 4 * sum(SIZES)


def test_state_bytes_are_known_before_the_first_step():
    optimizer, engine = make()
    predicted = engine.state_bytes
    step(optimizer, 1)
    assert predicted == live(optimizer)


def test_close_leaves_the_states_usable():
    resident = make_distributed_optimizer(SIZES)
    optimizer, engine = make()
    for seed in range(2):
        step(resident, seed)
        step(optimizer, seed)
        engine.begin_pass()
        engine.release()
        engine.require_writable()
    engine.begin_pass()
    engine.release()
    engine.close()
    step(resident, 9)
    step(optimizer, 9)
    assert state_bytes(optimizer) == state_bytes(resident)


def test_fp8_moments_are_refused_by_name():
    class Float8(torch.Tensor):
        pass

    optimizer, _ = make()
    step(optimizer, 1)
    param = optimizer.shard_fp32_from_float16_groups[0][0]
    optimizer.optimizer.state[param]["exp_avg"] = torch.zeros(param.shape).as_subclass(Float8)
    state = next(s for b in bundles(optimizer) if b.param is param for s in b.states if s.name == "exp_avg")
    with pytest.raises(ValueError, match="exp_avg_dtype"):
        state.read()


class AnyOrderOfVerbs(RuleBasedStateMachine):
    """Any order of the engine's verbs, loads and steps leaves the bits of optimizers that were never offloaded."""

    SIZES = (100, 7, 5000, 640)

    @initialize(
        count=st.integers(1, 2),
        small_parts=st.booleans(),
        remainders=st.sampled_from([None, True, False]),
        by_part=st.booleans(),
    )
    def attach(self, count, small_parts, remainders, by_part):
        self.optimizers, self.twins = ([self.made(seed, by_part) for seed in range(count)] for _ in range(2))
        self.sources = [MegatronSource(optimizer) for optimizer in self.optimizers]
        config = OffloadConfig(engine="native", slab_bytes=MIB, piece_bytes=65536, master_remainders=remainders)
        with pytest.MonkeyPatch.context() as patch:
            if small_parts:
                use_small_parts(patch)
            self.engine = NativeEngine(self.sources, config, PeakMeter())
        self.copies = []
        for optimizer, source in zip(self.optimizers, self.sources, strict=True):
            self.copies.append(optimizer._copy_main_params_to_model_params)
            copy = partial(self.engine.write_back, source, self.copies[-1])
            optimizer._copy_main_params_to_model_params = copy

    def made(self, seed, by_part):
        optimizer = with_model(make_distributed_optimizer(list(self.SIZES), seed, fp32_views=1))
        optimizer.ddp_config = SimpleNamespace(fp8_param_gather=not by_part)
        return optimizer

    def of(self, which):
        """Return a source with its optimizer and its twin; both counts of sources take any number."""
        which %= len(self.sources)
        return self.sources[which], self.optimizers[which], self.twins[which]

    def give_grads(self, which, seed):
        """Give an optimizer and its twin the same gradients."""
        _, *both = self.of(which)
        for optimizer in both:
            generator = torch.Generator().manual_seed(seed)
            for param in optimizer.optimizer.param_groups[0]["params"]:
                param.grad = torch.randn(param.shape, generator=generator)

    # The pass.

    @rule(verb=st.sampled_from(["begin_pass", "release", "point", "reload", "settle", "offload_now"]))
    def one_verb(self, verb):
        self.call(verb)
        if verb == "settle":
            assert SlabState.RELOADING not in residencies(self.engine)

    @rule(verbs=st.integers(2, 4))
    def a_pass_as_far_as_it_comes(self, verbs):
        for verb in ("begin_pass", "release", "point", "reload")[:verbs]:
            self.call(verb)

    def call(self, verb):
        """Call a verb of a pass."""
        getattr(self.engine, verb)(*[Mark(0, 0, 0)] if verb == "point" else ())

    @rule(updated=st.booleans(), packs=st.booleans())
    def end_a_step_and_choose_how_masters_are_copied(self, updated, packs):
        self.engine.settle()
        self.engine.end_step(updated)
        self.engine.schedule.packing.packs = packs

    # Steps.

    def run_step(self, which, seed, hooked):
        source, optimizer, twin = self.of(which)
        self.give_grads(which, seed)
        hook = optimizer.optimizer.register_step_post_hook(lambda *args: None) if hooked else None
        with self.engine.stepping(source):
            optimizer.optimizer.step()
            optimizer._copy_main_params_to_model_params()
        if hook is not None:
            hook.remove()
        twin.optimizer.step()
        twin._copy_main_params_to_model_params()

    @rule(seed=st.integers(0, 100), hooked=st.booleans())
    def step_all(self, seed, hooked):
        with self.engine.training_step(kind=seed % 2):
            for which in range(len(self.sources)):
                self.engine.updating()
                self.run_step(which, seed, hooked)

    @rule(which=st.integers(0, 1), seed=st.integers(0, 100), hooked=st.booleans())
    def step_one_outside_of_training(self, which, seed, hooked):
        self.run_step(which, seed, hooked)

    # Readers and writers.

    def check(self, which):
        _, optimizer, twin = self.of(which)
        assert state_bytes(optimizer) == state_bytes(twin)
        pairs = zip(optimizer.model_float16_groups[0], twin.model_float16_groups[0], strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)

    @rule(which=st.none() | st.integers(0, 1), masters_only=st.booleans())
    def read(self, which, masters_only):
        self.engine.require_readable(None if which is None else self.of(which)[0], masters_only)
        for each in range(len(self.sources)) if which is None else [which]:
            _, optimizer, twin = self.of(each)
            if masters_only:
                masters, of_twin = (one.shard_fp32_from_float16_groups[0] for one in (optimizer, twin))
                assert all(torch.equal(a, b) for a, b in zip(masters, of_twin, strict=True))
            else:
                self.check(each)

    @rule(which=st.integers(0, 1))
    def copy_to_the_model(self, which):
        _, optimizer, twin = self.of(which)
        optimizer._copy_main_params_to_model_params()
        twin._copy_main_params_to_model_params()

    @rule(which=st.integers(0, 1), seed=st.integers(0, 100), rounded=st.booleans())
    def train_by_hand(self, which, seed, rounded):
        source, optimizer, twin = self.of(which)
        self.engine.require_writable(source)
        self.give_grads(which, seed)
        optimizer.optimizer.step()
        twin.optimizer.step()
        if rounded:  # else the masters are not what the weights say
            self.copies[which % len(self.sources)]()
            twin._copy_main_params_to_model_params()

    @rule(which=st.none() | st.integers(0, 1), factor=st.sampled_from([0.5, 3.0]))
    def scale_masters(self, which, factor):  # as QK-clip does
        self.engine.require_writable(None if which is None else self.of(which)[0], masters_only=True)
        for each in range(len(self.sources)) if which is None else [which]:
            for optimizer in self.of(each)[1:]:
                for master in optimizer.shard_fp32_from_float16_groups[0]:
                    master.mul_(factor)

    @rule(which=st.integers(0, 1), seed=st.integers(0, 100), changed=st.booleans())
    def load_the_model(self, which, seed, changed):
        source, optimizer, twin = self.of(which)
        for one in (optimizer, twin):
            generator = torch.Generator().manual_seed(seed)
            for weight in one.model_float16_groups[0] if changed else []:
                weight.copy_(torch.randn(weight.shape, generator=generator))
        with self.engine.overwriting_masters(source):
            for one in (optimizer, twin):
                masters, weights = one.shard_fp32_from_float16_groups[0], one.model_float16_groups[0]
                for master, weight in zip(masters, weights, strict=True):
                    master.copy_(weight)

    @rule(which=st.integers(0, 1), seed=st.integers(0, 100), changed=st.booleans())
    def make_masters_anew_of_the_model(self, which, seed, changed):
        source, optimizer, twin = self.of(which)

        def copy(one):
            for masters, weights in zip(one.shard_fp32_from_float16_groups, one.model_float16_groups, strict=True):
                for master, weight in zip(masters, weights, strict=True):
                    master.data.copy_(weight)

        for one in (optimizer, twin):
            generator = torch.Generator().manual_seed(seed)
            for weight in one.model_float16_groups[0] if changed else []:
                weight.copy_(torch.randn(weight.shape, generator=generator))
        self.engine.rewrite_masters(source, partial(copy, optimizer))
        copy(twin)

    @rule(
        which=st.integers(0, 1),
        seed=st.integers(0, 100),
        in_place=st.booleans(),
        converted=st.sets(st.integers(0, 12)),
    )
    def load_each_parameter(self, which, seed, in_place, converted):
        """As mcore loads: into what was handed out before (`in_place`), and else from anywhere and in any dtype."""
        source, optimizer, twin = self.of(which)

        def states(one, param):
            return {"param": param, **one.optimizer.state.get(param, {})}

        def write(param, values):
            for name, value in states(optimizer, param).items():
                value.data.copy_(values[name])

        generator = torch.Generator().manual_seed(seed)
        pairs = self.pairs(which)
        loaded = []
        with self.engine.loading(source, everything=in_place):
            for param, other in pairs:
                targets = self.engine.hand_out(source, param, partial(states, optimizer, param))
                for name, value in states(twin, other).items():
                    if value.dim():  # not torch's count of steps
                        value.data.copy_(torch.rand(value.shape, generator=generator))  # a second moment is positive
                    converts = len(loaded) in converted and value.dim()
                    if in_place and not converts:
                        targets[name].data.copy_(value)
                    else:
                        targets[name] = value.double() if converts else value.clone()
                loaded.append(targets)
        with self.engine.loading(source, masters=True):
            for (param, _), values in zip(pairs, loaded, strict=True):
                read = partial(states, optimizer, param)
                hand_out = partial(self.engine.hand_out, source, param, read)
                self.engine.put(source, param, hand_out, values, partial(write, param))

    def pairs(self, which):
        _, *both = self.of(which)
        groups = (one.optimizer.param_groups[0]["params"] for one in both)
        return list(zip(*groups, strict=True))

    @rule(which=st.integers(0, 1), seed=st.integers(0, 100))
    def load_a_checkpoint(self, which, seed):
        source, *both = self.of(which)
        self.engine.require_writable(source)
        for optimizer in both:
            generator = torch.Generator().manual_seed(seed)
            for param in optimizer.shard_fp32_from_float16_groups[0]:
                param.data.copy_(torch.randn(param.shape, generator=generator))
                if param in optimizer.optimizer.state:
                    optimizer.optimizer.state[param]["exp_avg"] = torch.randn(param.shape, generator=generator)
            load_state_dict(optimizer)
        self.engine.states_replaced(source)

    # Checkpoints.

    def hand_out_all(self, source, optimizer, twin):
        params, of_twin = (one.optimizer.param_groups[0]["params"] for one in (optimizer, twin))
        for param, other in zip(params, of_twin, strict=True):
            states = {"param": param, **optimizer.optimizer.state.get(param, {})}
            handed = self.engine.hand_out(source, param, lambda states=states: states)
            expected = {"param": other, **twin.optimizer.state.get(other, {})}
            assert handed.keys() == expected.keys()
            assert all(torch.equal(handed[name], value) for name, value in expected.items())

    @rule(which=st.integers(0, 1), copies=st.none() | st.booleans())
    def hand_out(self, which, copies):
        source, *both = self.of(which)
        if copies is None:  # to a reader who makes no checkpoint
            self.hand_out_all(source, *both)
            return
        away = [slab for slab in self.engine.slabs if slab.state is SlabState.RELEASED]
        with self.engine.saving(source, copies):
            assert self.engine.is_checkpointing(source)
            self.hand_out_all(source, *both)
        assert not self.engine.is_checkpointing(source)
        assert all(slab.state is SlabState.RELEASED for slab in away)

    @invariant()
    def what_is_counted_is_what_there_is(self):
        if not hasattr(self, "engine"):
            return
        engine = self.engine
        assert engine.schedule.ledger.nbytes == sum(slab.gpu_bytes for slab in engine.slabs)
        away = sum(slab.state_bytes for slab in engine.slabs if slab.state is SlabState.RELEASED)
        assert engine.traffic.released == away
        assert not engine.is_torn and not engine.is_lost

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        self.engine.close()
        for which in range(len(self.sources)):
            self.check(which)
            self.give_grads(which, seed=0)
            self.optimizers[which].optimizer.step()
            self.twins[which].optimizer.step()
            self.check(which)


TestAnyOrderOfVerbs = AnyOrderOfVerbs.TestCase
TestAnyOrderOfVerbs.settings = settings(max_examples=80, stateful_step_count=25, deadline=None)


def test_any_order_of_the_verbs_leaves_bits_right_with_late_copies_and_poison(monkeypatch):
    monkeypatch.setenv(VARIABLE, "7")
    few = settings(max_examples=40, stateful_step_count=20, deadline=None)
    run_state_machine_as_test(AnyOrderOfVerbs, settings=few)
