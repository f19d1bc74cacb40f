"""Any order of calls leaves the bits of optimizers that were never offloaded."""

import copy
import warnings
from functools import partial
from tempfile import TemporaryDirectory

import pytest
import torch
from accesses import ACCESSES, READS, assert_same
from debug_transfers import VARIABLE
from fake_training import POINTS, WHOLE, Meter, Training, mark, masters_of, use_small_parts, weights_of
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from late_disk import has_direct_files

from bridge_fgo.memory.slab import SlabState
from bridge_fgo.states.distributed import bundles, home_device, live_bytes

RAN_ON = "CPU"

VERBS = ["begin_pass", "release", "point", "reload", "settle", "offload_now"]
SEEDS, WHICH = st.integers(0, 99), st.integers(0, 1)
SETTINGS = st.sampled_from([{}, {}, {}, {"fraction": 0.3}, {"moments": False}, {"master_weights": False}])


class AnyOrder(RuleBasedStateMachine):
    """Verbs, steps, readers, writers, saves and loads, of one optimizer or two.

    `which` takes any number, with both counts of optimizers; None is both.
    """

    @initialize(
        layer=st.integers(0, WHOLE),
        step=st.integers(0, 4 * WHOLE),
        budget=st.none() | st.integers(0, WHOLE),
        small_parts=st.sampled_from([True, True, False]),
        measures=st.booleans(),
        lends=st.booleans(),
        calls=st.integers(1, 2),
        remainders=st.booleans(),
        optimizers=st.integers(1, 2),
        quantized=st.booleans(),
        settings=SETTINGS,
        in_file=st.booleans(),
        steps=st.integers(0, 4),
    )
    def start(self, layer, step, budget, small_parts, measures, lends, calls, remainders, settings, steps, **how):
        self.patch, self.warnings = pytest.MonkeyPatch(), warnings.catch_warnings()
        self.warnings.__enter__()
        warnings.simplefilter("error")
        use_small_parts(self.patch)
        if not small_parts:
            self.patch.setattr("bridge_fgo.memory.layout.LEAST_PART_BYTES", 2**20)
        self.can_be_whole = budget is None or not (small_parts and measures)
        if self.can_be_whole:
            budget = None
            self.patch.setattr(Meter, "works", measures)
        else:  # what the pass and the step need in any case, and something for states
            budget += max(4 * layer, step + 2 * WHOLE)
            settings = {}
        if "master_weights" in settings:
            remainders = False
        self.folder = TemporaryDirectory()
        self.patch.setattr("bridge_fgo.memory.slab_file.BUFFERS", 3)
        self.patch.setattr("bridge_fgo.memory.slab_file.MOST_AHEAD", 1)
        self.patch.setattr("bridge_fgo.memory.slab_file.REQUEST_BYTES", 4096)
        in_file = how.pop("in_file") and small_parts
        how["in_file"] = self.folder.name if in_file and has_direct_files(self.folder.name) else None
        self.training = Training(
            layer, step, budget=budget, master_remainders=remainders, fp32_views=1, **settings, **how
        )
        self.training.calls, self.engine = calls, self.training.engine
        self.writers = []
        self.training.steps(steps)  # after three of them plans hold
        if lends:
            self.engine.use_worker_memory()

    def of(self, which):
        """Return a source with its optimizer and its twin."""
        source = self.training.sources[which % len(self.training.sources)]
        return source, *self.training.both(source)

    def each(self, which):
        return [self.of(one) for one in (range(len(self.training.sources)) if which is None else [which])]

    # The pass.

    @rule(first=st.integers(0, len(VERBS) - 1), count=st.integers(1, 4))
    def some_verbs(self, first, count):
        for verb in VERBS[first : first + count]:
            getattr(self.engine, verb)(*[mark(1, self.training.meter.layer)] if verb == "point" else ())
            if verb == "settle":
                assert SlabState.RELOADING not in self.training.residencies

    @rule(points=st.integers(0, POINTS))
    def break_off_a_pass(self, points):
        before, places = self.states(), self.places_of_views()
        self.training.begin()
        if not self.training.schedule.is_planned:
            assert not any(self.live(optimizer) for _, optimizer, _ in self.each(None)) or self.leaves_some
        self.training.run_pass(points)
        self.training.end_step(updated=False)
        assert all(a is b for a, b in zip(self.states(), before, strict=True)), "tensors keep their identity"
        assert self.places_of_views() == places, "views of DDP's buffer never move"

    def places_of_views(self):
        params = [one.optimizer.param_groups[0]["params"][0] for one in self.training.optimizers]
        assert all(param.numel() == 8 for param in params)
        return [param.data_ptr() for param in params]

    @property
    def leaves_some(self):
        return self.engine.planned_bytes < self.engine.state_bytes

    def states(self):
        return [mine for mine, _ in self.training.states()]

    def live(self, optimizer):
        return live_bytes(bundles(optimizer), home_device(optimizer))

    @rule(updated=st.booleans(), packs=st.booleans(), kind=st.integers(1, 2))
    def end_a_step_and_choose_what_comes(self, updated, packs, kind):
        self.training.end_step(updated)
        self.training.pack(packs)
        self.training.schedule.kind = kind

    # Steps.

    @rule(
        seed=SEEDS,
        passes=st.integers(1, 2),
        skip=st.booleans(),
        points=st.sampled_from([POINTS, POINTS, POINTS, 6]),
        hooked=st.booleans(),
    )
    def step(self, seed, hooked, **how):
        self.hooked(hooked, partial(self.training.step, seed, **how))

    @rule(which=WHICH, seed=SEEDS, hooked=st.booleans())
    def step_one_outside_of_training(self, which, seed, hooked):
        self.hooked(hooked, partial(self.training.update_one, self.of(which)[0], seed))

    def hooked(self, hooked, run):
        """Run something while a hook keeps the optimizers' steps whole, if the budget has room for that."""
        inner = [one.optimizer for one in self.training.optimizers if hooked and self.can_be_whole]
        hooks = [one.register_step_post_hook(lambda *args: None) for one in inner]
        run()
        for hook in hooks:
            hook.remove()

    @rule(which=WHICH, seed=SEEDS, rounded=st.booleans())
    def train_by_hand(self, which, seed, rounded):
        source, optimizer, twin = self.of(which)
        self.engine.require_writable(source)
        self.training.give_grads((optimizer, twin), seed)
        for one in (optimizer, twin):
            one.optimizer.step()
        if rounded:  # else the masters are not what the weights say
            for one in (optimizer, twin):
                one._copy_main_params_to_model_params()

    # Readers and writers.

    @rule(which=st.none() | WHICH, masters_only=st.booleans())
    def read(self, which, masters_only):
        self.engine.require_readable(None if which is None else self.of(which)[0], masters_only)
        for source, *both in self.each(which):
            if masters_only:
                assert all(torch.equal(*pair) for pair in zip(*map(masters_of, both), strict=True))
            else:
                self.training.check_one(source)

    @rule(which=WHICH)
    def copy_to_the_model(self, which):
        for one in self.of(which)[1:]:
            one._copy_main_params_to_model_params()

    @rule(name=st.sampled_from(list(ACCESSES)), number=st.integers(0, 40))
    def touch(self, name, number):
        found = self.training.states()
        assert_same(ACCESSES[name], found[number % len(found)])

    @rule(name=st.sampled_from(list(READS)), number=st.integers(0, 40), points=st.integers(1, 7))
    def touch_in_a_pass(self, name, number, points):
        self.training.run_pass(points)
        found = self.training.states()
        assert_same(READS[name], found[number % len(found)])
        self.training.finish()

    @rule(which=st.none() | WHICH, factor=st.sampled_from([0.5, 3.0]))
    def scale_masters(self, which, factor):  # as QK-clip does
        self.engine.require_writable(None if which is None else self.of(which)[0], masters_only=True)
        for _, *both in self.each(which):
            for master in (master for one in both for master in masters_of(one)):
                master.mul_(factor)

    # Loads.

    @rule(which=WHICH, seed=SEEDS, changed=st.booleans(), by_part=st.booleans())
    def load_the_model(self, which, seed, changed, by_part):
        source, *both = self.of(which)
        if changed:
            for one in both:
                fill(weights_of(one), seed)
        if by_part:
            self.engine.rewrite_masters(source, partial(make_masters_anew, both[0]))
        else:
            with self.engine.overwriting_masters(source):
                make_masters_anew(both[0])
        make_masters_anew(both[1])

    @rule(which=WHICH, seed=SEEDS)
    def load_a_checkpoint(self, which, seed):
        source, *both = self.of(which)
        self.engine.require_writable(source)
        for one in both:
            fill(masters_of(one), seed)
            for state in one.optimizer.state.values():
                state["exp_avg"] = torch.randn(state["exp_avg"].shape, generator=torch.Generator().manual_seed(seed))
            one.optimizer.load_state_dict(copy.deepcopy(one.optimizer.state_dict()))  # replaces every tensor
        self.engine.states_replaced(source)

    @rule(which=WHICH, seed=SEEDS, in_place=st.booleans(), converted=st.sets(st.integers(0, 12)))
    def load_each_parameter(self, which, seed, in_place, converted):
        """As mcore loads: into what was handed out before (`in_place`), and else from anywhere and in any dtype."""
        source, optimizer, twin = self.of(which)

        def states(one, param):
            return {"param": param, **one.optimizer.state.get(param, {})}

        def write(param, values):
            for name, value in states(optimizer, param).items():
                value.data.copy_(values[name])

        generator = torch.Generator().manual_seed(seed)
        pairs, loaded = self.training.pairs(source), []
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

    # Saves.

    @rule(which=WHICH, copies=st.booleans())
    def save(self, which, copies):
        source = self.of(which)[0]
        away = [slab for slab in self.training.slabs() if slab.state is SlabState.RELEASED]
        tensors = self.training.saved(source, copies)
        assert not self.engine.is_checkpointing(source)
        assert all(slab.state is SlabState.RELEASED for slab in away)
        if copies:  # which a background writer keeps, but for what is not offloaded
            own = set(map(id, self.states()))
            self.writers.append([(tensor, tensor.clone()) for tensor in tensors if id(tensor) not in own])

    @rule(which=WHICH)
    def hand_out_to_a_reader_who_makes_no_checkpoint(self, which):
        self.training.handed(self.of(which)[0])

    @precondition(lambda self: self.writers)
    @rule()
    def writer_is_done(self):
        self.writers.pop(0)

    # What holds always.

    @invariant()
    def what_is_counted_is_what_there_is(self):
        if not hasattr(self, "training"):
            return
        slabs = self.training.slabs()
        assert self.training.schedule.ledger.nbytes == sum(slab.gpu_bytes for slab in slabs)
        away = sum(slab.state_bytes for slab in slabs if slab.state is SlabState.RELEASED)
        assert self.engine.traffic.released == away
        assert not self.engine.is_torn and not self.engine.is_lost

    @invariant()
    def asking_for_a_state_makes_no_entry(self):
        if not hasattr(self, "training"):
            return
        for one, twin in zip(self.training.optimizers, self.training.twins, strict=True):
            assert len(one.optimizer.state) == len(twin.optimizer.state), "an Adam takes an empty entry for a state"

    @invariant()
    def writers_have_what_they_were_given(self):
        assert all(torch.equal(*pair) for pairs in getattr(self, "writers", []) for pair in pairs)

    def teardown(self):
        try:
            if hasattr(self, "training"):
                self.close()
        finally:
            self.warnings.__exit__(None, None, None)
            self.patch.undo()
            self.folder.cleanup()

    def close(self):
        self.engine.close()
        self.writers_have_what_they_were_given()
        for _ in range(2):
            self.training.check()
            for source in self.training.sources:
                both = self.training.both(source)
                self.training.give_grads(both)
                for one in both:
                    one.optimizer.step()


def fill(tensors, seed):
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors:
        tensor.data.copy_(torch.randn(tensor.shape, generator=generator))


def make_masters_anew(optimizer):
    """Copy weights to masters; lists are those of the optimizer now, which has a part of them."""
    for masters, weights in zip(optimizer.shard_fp32_from_float16_groups, optimizer.model_float16_groups, strict=True):
        for master, weight in zip(masters, weights, strict=True):
            master.data.copy_(weight)


@pytest.mark.parametrize(
    ("debug", "examples"),
    [("", 20), ("7", 20), pytest.param("", 80, marks=pytest.mark.slow), pytest.param("8", 50, marks=pytest.mark.slow)],
)
def test_any_order_leaves_bits_right_with_late_copies_and_poison_too(monkeypatch, debug, examples):
    monkeypatch.setenv(VARIABLE, debug)
    few = settings(max_examples=examples, stateful_step_count=25, deadline=None)
    run_state_machine_as_test(AnyOrder, settings=few)
