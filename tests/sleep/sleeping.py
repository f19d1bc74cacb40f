"""A CPU training that sleeps: its memory is overwritten before it goes, so that nothing can come back by chance."""

import contextlib
import dataclasses
from unittest import mock

import both
import pytest
import torch
from cpu_training import CpuOptions
from spies import fail

import bridge_fgo
from bridge_fgo.bridge import residency as residency_module
from bridge_fgo.memory import host_buffer
from bridge_fgo.memory.host_buffer import FileBuffer, HostBuffer
from bridge_fgo.memory.slab import StillShared
from bridge_fgo.sleep import moves, trainer_memory, weight_sets
from bridge_fgo.sleep.moved import Tally
from bridge_fgo.states.distributed import live_bytes

SEVERAL_SLABS = {"hidden": 128, "sequence": 32, "vocab": 128}
KINDS = ("params", "grads", "optimizer")
WHOLE = dataclasses.replace(both.WHOLE, master_remainders=False)
GIB = 2**30


def frozen(_, param):
    return not param.requires_grad


def trained(_, param):
    return param.requires_grad


def frozen_in_a_layer(name, param):
    return "layers.0" in name and not param.requires_grad


def experts(name, _):
    return "experts" in name


def options(**changes):
    """Return the options of a small training."""
    return CpuOptions(**both.SMALL | changes)


def resident(steps, writes=(), **changes):
    """Return the steps and the bits of a training that never sleeps, and is written by hand as `Sleeper.writes`."""
    if not writes:
        both.resident(max(steps, 6), **changes)  # shorter ones are its beginning
        record, bits = both.resident(steps, **changes)
        return record.steps, bits
    seen = []
    with both.training(False, **changes) as run:
        for number in range(steps + 1):
            for act in [act for after, act in writes if after == number]:
                act(run)
            seen += [run.step()] if number < steps else []
        return seen, both.bits(run)


class Sleeper:
    """A training and its Residency, whose verbs check after each call what has memory, and whose bits are there."""

    def __init__(self, training, changes):
        self.training, self.changes, self.seen = training, changes, []
        self.how = {}
        """Arguments of the Residency."""
        self.writes = []
        """Pairs of a number of steps and what was written by hand after so many: a function of a training."""
        self.own, self.kept = self.weights(), {}
        self._res = None

    @property
    def res(self):
        """The Residency of the model, made when it is first asked for."""
        return self._res or bridge_fgo.Residency.of(self.training.model) or self.make(**self.how)

    def make(self, **how):
        """Make a Residency, once the one that there is has been closed; return it."""
        if self._res is not None:
            self._res.close()
        self.kept, self._res = {}, residency(self.training, **how)
        return self._res

    @property
    def ddp(self):
        return self.training.model[0]

    @property
    def leaf(self):
        return self.training.optimizer.chained_optimizers[0]

    @property
    def transfers(self):
        """The class that copies states."""
        return type(self.res._memory.states.engine.schedule.transfers)

    @property
    def moment(self):
        return next(iter(self.leaf.optimizer.state.values()))["exp_avg"]

    @property
    def weight(self):
        return next(self.ddp.parameters())

    @property
    def lacks_masters(self):
        """Whether packed masters are away, which come back by the weights as these were."""
        return self.res._memory.states.reads_weights and "optimizer" in self.res.away

    @property
    def weights_bytes(self):
        """Bytes of all parameters in DDP's buffers."""
        return sum(buffer.param_data.nbytes for buffer in buffers(self.training))

    # Each tensor is looked for by its storage.

    def params(self):
        return [param for ddp in self.training.model for param in ddp.parameters()]

    def weights(self):
        """Return copies of all weights."""
        return [param.detach().clone() for param in self.params()]

    def names(self, where=None):
        """Return the names of parameters for which a predicate holds."""
        return {name for name, p in self.ddp.named_parameters() if where is None or where(name, p)}

    def names_away(self):
        """Return the names of parameters that have no memory."""
        return self.names(lambda _, param: not param.untyped_storage().nbytes())

    def states_bytes(self):
        """Return the bytes of memory that masters and moments take now."""
        return sum(live_bytes(source.states(), source.device) for source in self.res._memory.states.sources)

    def weights_here(self):
        """Return the bytes of memory that weights take now."""
        storages = {p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in self.params()}
        return sum(storages.values())

    def gone(self):
        """Return the kinds whose memory is empty."""
        return gone(self.res)

    def check(self):
        """Check that what has no memory counts as away, and that weights have the bits of their training."""
        away, is_here = self.res.away, [bool(param.untyped_storage().nbytes()) for param in self.params()]
        assert self.gone() <= away and ("params" in away) == (not all(is_here))
        for here, param, own in zip(is_here, self.params(), self.own, strict=True):
            assert not here or torch.equal(param, own)

    # These verbs change bits.

    def train(self, steps=1):
        """Train on, and return what was seen."""
        self.seen += [self.training.step() for _ in range(steps)]
        self.own = self.weights()
        return both.numbers(self.seen)

    def write(self, value=123.0):
        """Change a weight by hand."""
        self.write_by(lambda training: next(training.model[0].parameters()).detach().view(-1)[3].fill_(value))
        self.own[0] = self.weight.detach().clone()

    def write_by(self, act):
        """Have a function of a training change it; the resident one gets the same."""
        self.writes.append((len(self.seen), act))
        act(self.training)

    # Verbs.

    def offload(self, *kinds, **how):
        """Offload; what is freed is what the storages had, and goes to the driver last."""
        returns, held = [], self._bytes()
        with mock.patch.object(moves, "return_to_driver", lambda device: returns.append(self.gone())):
            moved = self.res.offload(*kinds, **how)
        self.check()
        assert moved.freed >= held - self._bytes()  # and what shards' gradients had
        assert not returns or returns[-1] == self.gone()
        return moved

    def reload(self, *kinds, **how):
        """Reload; what is taken is what the storages have."""
        held = self._bytes()
        moved = self.res.reload(*kinds, **how)
        self.check()
        assert moved.freed == held - self._bytes()
        return moved

    def _bytes(self):
        """Return the bytes of all that moves and has memory now; a state may be a weight too."""
        bundles = [bundle for source in self.res._memory.states.sources for bundle in source.states()]
        states = [each.read() for bundle in bundles for each in bundle.states]
        weights = {param.untyped_storage()._cdata for param in self.params()}
        apart = [each for each in states if each is not None and each.untyped_storage()._cdata not in weights]
        gradients = sum(slab.storage.nbytes() for slab in self.res._memory.gradients.slabs)
        return self.weights_here() + gradients + sum(each.nbytes for each in apart if each.untyped_storage().nbytes())

    @contextlib.contextmanager
    def as_before(self):
        """Context after which as much is away as before."""
        before = self.res.away, self.weights_here()
        yield
        self.check()
        assert (self.res.away, self.weights_here()) == before

    @contextlib.contextmanager
    def only(self, *kinds, **how):
        with self.as_before(), self.res.only(*kinds, **how) as moved:
            self.check()
            yield moved

    def read_asleep(self):
        """Check that the host has all weights, and that nothing moves to read them."""
        with self.as_before():
            of_names = [dict(chunk.named_parameters()) for chunk in self.res._memory.chunks]
            found = {}
            for name, param, first, values in self.res.host_params():
                assert first == 0 and any(of.get(name) is param for of in of_names)
                found[id(param)] = values.clone().view(param.shape)
            assert all(torch.equal(found[id(param)], own) for param, own in zip(self.params(), self.own, strict=True))

    def keep(self, name, **how):
        """Keep the weights that there are under a name."""
        moved = self.res.keep(name, **how)
        self.kept[name] = self.weights()
        return moved

    @contextlib.contextmanager
    def swap(self, name):
        """Swap weights in that were kept under a name."""
        with self.as_before(), self.res.weights(name) as moved:
            assert all(map(torch.equal, self.params(), self.kept[name]))
            yield moved

    @contextlib.contextmanager
    def failing(self, owner, name, call=2, error=StillShared):
        """Context that a call of a method ends by an error, by default the second."""
        with pytest.MonkeyPatch.context() as patch, pytest.raises(error):
            fail(patch, owner, name, error, call)
            yield
        self.check()

    def end(self, steps=1):
        """Reload, train on and end the training; all it gave, and its state, are those of one that never sleeps."""
        self.res.reload()
        self.check()
        self.train(steps)
        self.res.close()
        self.assert_as_resident()

    def assert_as_resident(self):
        """End the training; check what was seen, and its state, against a training that never sleeps."""
        bits = both.bits(self.training)
        self.training.close()
        steps, expected = resident(len(self.seen), self.writes, **self.changes)
        assert both.numbers(self.seen) == both.numbers(steps)
        assert bits == expected


def double_masters(training):
    """Double all masters of DistributedOptimizers."""
    for leaf in training.optimizer.chained_optimizers:
        for master in (each for group in leaf.shard_fp32_from_float16_groups for each in group):
            master.mul_(2)


@contextlib.contextmanager
def sleeping(flag=None, **changes):
    """A `Sleeper` of a training. flag: the config that is installed for it, with the flag set."""
    is_set = flag is not None
    with both.training(is_set, flag or WHOLE, installed=is_set, **changes) as training:
        yield Sleeper(training, changes)


@pytest.fixture
def sleeper(cpu_standins, poisoned):
    """A function that makes a `Sleeper`, trained for some steps; one at a time.

    config: of its Residency. early: make that before the first step, which makes the moments. how: as `sleeping`.
    """
    with contextlib.ExitStack() as stack:

        def make(steps=1, config=None, early=False, **how):
            stack.close()
            made = stack.enter_context(sleeping(**how))
            made.how = {"config": config}
            assert not early or made.res is not None
            made.train(steps)
            return made

        yield make


@contextlib.contextmanager
def counted():
    """Context that gives what of host memory was mapped in it, by sizes; files are left out."""
    taken = []
    with mock.patch.object(HostBuffer, "__init__", autospec=True, side_effect=HostBuffer.__init__) as make:
        yield taken
    taken += [call.args[1] for call in make.call_args_list if not isinstance(call.args[0], FileBuffer)]


def buffers(training):
    """Return DDP's buffers."""
    return [b for ddp in training.model for b in ddp.buffers + ddp.expert_parallel_buffers]


def gone(res):
    """Return the kinds whose memory is empty, by the storages themselves."""
    found = set()
    for kind, part in (("params", res._memory.weights), ("grads", res._memory.gradients)):
        if part.slabs and not any(slab.storage.nbytes() for slab in part.slabs):
            found.add(kind)
    if res._memory.states is not None and not sum(live_bytes(s.states(), s.device) for s in res._memory.states.sources):
        found.add("optimizer")
    return found


@pytest.fixture
def disk(tmp_path, monkeypatch):
    """A folder that is taken for one on a disk: pytest's may be on a tmpfs."""
    monkeypatch.setattr(host_buffer, "file_system", lambda device: "")
    return tmp_path


@pytest.fixture
def poisoned(monkeypatch):
    """Storages are overwritten before they go."""
    both.poison(monkeypatch)


def residency(training, **how):
    """Return the residency of a training."""
    return bridge_fgo.Residency(training.model, training.optimizer, **how)


def another_rank(patch, vote_of):
    """Have another rank take part in what ranks tell each other. vote_of: returns its vote, given this rank's."""
    told = moves.gather_or_raise

    def told_by_both(act):
        own, votes = told(act)
        return own, [*votes, vote_of(votes[0])]

    for module in (residency_module, trainer_memory, moves, weight_sets):
        patch.setattr(module, "gather_or_raise", told_by_both)


def lock_fails_once(patch, res):
    """Keep gradients in a sleep, whose host memory is locked by the second call alone; return what that locks."""
    asked = []

    def locks(hosts):
        asked.append(list(hosts))
        if len(asked) == 1:
            raise RuntimeError("raise `ulimit -l`")

    patch.setattr(trainer_memory, "page_lock", locks)
    patch.setattr(res._memory, "pins", True)  # as on a GPU, of a Residency without settings of its own
    with pytest.raises(RuntimeError, match="ulimit"):
        res.offload(grads="keep")
    assert "grads" not in res.away
    res.offload(grads="keep")
    assert asked[0] == asked[1]
    return asked[0]


def tally_of_a_gpu(patch, free, allocated, reserved):
    """Return a `Tally` of a GPU of 9 GB with so much memory free, or taken by PyTorch's allocator."""
    patch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 9 * 10**9))
    patch.setattr(torch.cuda, "memory_allocated", lambda device: allocated.pop(0))
    patch.setattr(torch.cuda, "memory_reserved", lambda device: reserved)
    return Tally(torch.device("cuda", 0))
