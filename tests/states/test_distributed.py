"""What a DistributedOptimizer claims as a source of states: its step part by part, and its copy to the weights."""

from types import SimpleNamespace

import pytest
import torch
from fake_optimizer import make_distributed_optimizer, state_bytes, with_model

from bridge_fgo.config import OffloadConfig
from bridge_fgo.engines.native import NativeEngine
from bridge_fgo.memory.meters import PeakMeter
from bridge_fgo.states.distributed import MegatronSource

SIZES = [100, 64, 300, 8, 50]
QUANTIZED = ("ddp_config", "fp8_param_gather")


def made(fp32_views=0, seed=0):
    """Return a DistributedOptimizer with gradients and a model, and its source."""
    optimizer = with_model(make_distributed_optimizer(SIZES, fp32_views=fp32_views))
    generator = torch.Generator().manual_seed(seed)
    for param in optimizer.optimizer.param_groups[0]["params"]:
        param.grad = torch.randn(param.shape, generator=generator)
    return optimizer, MegatronSource(optimizer)


def with_native_weight(optimizer):
    """Give it an fp32 parameter of the model's, which its copy to the model takes too."""
    shard, model = torch.full((4,), 7.0), torch.zeros(4)
    optimizer.shard_fp32_groups, optimizer.model_fp32_groups = [[shard]], [[model]]
    masters_only = optimizer._copy_main_params_to_model_params

    def copy():
        masters_only()
        for shards, models in zip(optimizer.shard_fp32_groups, optimizer.model_fp32_groups, strict=True):
            for one, of_model in zip(shards, models, strict=True):
                of_model.copy_(one)
                optimizer.copied.append(id(one))

    optimizer._copy_main_params_to_model_params = copy
    return shard, model


def masters_of(optimizer):
    return optimizer.shard_fp32_from_float16_groups[0]


def weights_of(optimizer):
    return optimizer.model_float16_groups[0]


class FakePart:
    """What a source sees of a part: whose states, and whether they are copied to the model."""

    def __init__(self, params, written_back=True):
        self.ids, self.written_back, self.noted = frozenset(map(id, params)), written_back, 0

    def mark_just_rounded(self):
        self.noted += 1


def stepped(optimizer, source, parts, look=lambda part: None):
    """Step the parts inside `stepping`, as an engine does, and return what `look` says after each."""
    seen = []

    def run():
        for part in (None, *parts):
            source.step(part)
            seen.append(look(part))

    owners = {i: part for part in parts for i in part.ids}
    with source.stepping(run, owners):
        optimizer.optimizer.step()
    return seen


def written(source):
    """Return the `id`s that a copy of all masters would leave out; None while a part is copied."""
    with source.writing_back() as ids:
        return ids


def test_it_gives_masters_with_the_weights_they_are_rounded_to_and_moments_that_the_first_step_makes():
    optimizer, source = made(fp32_views=1)
    assert source.device == optimizer.buffers[0].grad_data.device
    bundles = source.states()
    native, *params = optimizer.optimizer.param_groups[0]["params"]
    assert bundles[0].param is native
    assert [state.kind for state in bundles[0].states] == ["moment", "moment"]
    for bundle, param, weight in zip(bundles[1:], params, weights_of(optimizer), strict=True):
        master, *moments = bundle.states
        assert master.read() is param is bundle.param
        assert master.written_back and torch.equal(master.rounds_to.tensor(), weight)
        assert master.rounds_to.tensor().data_ptr() == weight.data_ptr()
        assert all(moment.late and moment.rounds_to is None for moment in moments)


def test_its_step_is_kept_whole_where_a_hook_hangs_on_it():
    optimizer, source = made()
    assert not source.kept_whole_by()
    handle = optimizer.optimizer.register_step_post_hook(lambda *args: None)
    assert source.kept_whole_by()
    handle.remove()
    assert not source.kept_whole_by()


def test_a_part_that_steps_updates_its_own_parameters_and_copies_its_own_masters_to_the_model():
    whole, _ = made()
    whole.optimizer.step()
    whole._copy_main_params_to_model_params()
    optimizer, source = made()
    masters, weights = masters_of(optimizer), weights_of(optimizer)
    before = [master.clone() for master in masters]
    parts = [FakePart(masters[:2]), FakePart([masters[3]]), FakePart([masters[2], masters[4]])]

    def look(part):
        updated = frozenset(id(m) for m, old in zip(masters, before, strict=True) if not torch.equal(m, old))
        on_model = frozenset(id(m) for m, w in zip(masters, weights, strict=True) if torch.equal(w, m.bfloat16()))
        return updated, on_model, written(source), frozenset(optimizer.copied)

    seen = stepped(optimizer, source, parts, look)
    done = frozenset()
    everything = frozenset(map(id, masters))
    for (updated, on_model, said, copied), ids in zip(seen, [frozenset(), *(p.ids for p in parts)], strict=True):
        done |= ids
        assert updated == said == copied == done
        assert on_model == everything, "the weight of a master is its rounding before its update, and after"
    assert len(optimizer.copied) == len(masters), "each of them once"
    assert [part.noted for part in parts] == [1, 1, 1], "its states were just made what the weights say"
    assert state_bytes(optimizer) == state_bytes(whole)
    assert all(torch.equal(a, b) for a, b in zip(weights, weights_of(whole), strict=True))


def test_parameters_of_no_part_are_updated_and_not_copied():
    optimizer, source = made()
    masters = masters_of(optimizer)
    before = [weight.clone() for weight in weights_of(optimizer)]
    old = masters[0].clone()
    stepped(optimizer, source, [])
    assert not torch.equal(masters[0], old)
    assert optimizer.copied == []
    assert all(torch.equal(a, b) for a, b in zip(weights_of(optimizer), before, strict=True))


def test_a_part_without_masters_is_updated_and_nothing_of_it_copied():
    optimizer, source = made()
    part = FakePart(masters_of(optimizer), written_back=False)
    seen = stepped(optimizer, source, [part], lambda part: written(source))
    assert seen == [frozenset()] * 2
    assert (optimizer.copied, part.noted) == ([], 0)


@pytest.mark.parametrize(
    ("where", "name"), [QUANTIZED, ("ddp_config", "fp4_param_gather"), ("config", "reuse_grad_buf_for_mxfp8_param_ag")]
)
def test_where_the_copy_does_not_divide_a_part_is_updated_and_all_masters_are_left_for_the_copy(where, name):
    optimizer, source = made()
    assert source.writes_back_by_part
    setattr(optimizer, where, SimpleNamespace(**{name: True}))
    assert not source.writes_back_by_part
    part = FakePart(masters_of(optimizer))
    old = masters_of(optimizer)[0].clone()
    seen = stepped(optimizer, source, [part], lambda part: written(source))
    assert seen == [frozenset()] * 2
    assert (optimizer.copied, part.noted) == ([], 0)
    assert not torch.equal(masters_of(optimizer)[0], old)
    assert all(state.rounds_to is None for bundle in source.states() for state in bundle.states)


def test_it_tells_while_it_copies_a_part_and_only_then():
    optimizer, source = made()
    told = []
    copy = optimizer._copy_main_params_to_model_params
    optimizer._copy_main_params_to_model_params = lambda: (told.append(written(source)), copy())
    assert written(source) == frozenset()
    part = FakePart(masters_of(optimizer)[:1])
    between = stepped(optimizer, source, [part], lambda part: written(source))
    assert (told, between) == ([None], [frozenset(), part.ids])
    optimizer._copy_main_params_to_model_params()
    assert told == [None, frozenset()]


def test_the_rest_is_what_was_not_copied_part_by_part_and_the_native_fp32_parameters():
    optimizer, source = made()
    native, of_model = with_native_weight(optimizer)
    masters = masters_of(optimizer)
    lists = dict(vars(optimizer))

    def run():
        source.step(None)
        source.step(FakePart(masters[:2]))
        assert sorted(optimizer.copied) == sorted(map(id, masters[:2]))
        assert not of_model.any(), "native fp32 parameters are no masters"

    with source.stepping(run, {id(m): None for m in masters}):
        optimizer.optimizer.step()
        optimizer.copied.clear()
        with source.writing_back():
            optimizer._copy_main_params_to_model_params()
    assert optimizer.copied == [*(id(m) for m in masters[2:]), id(native)]
    assert torch.equal(of_model, native)
    assert {name: vars(optimizer)[name] for name in lists} == lists, "its own lists are back"


def test_outside_of_a_step_the_rest_is_everything():
    optimizer, source = made()
    stepped(optimizer, source, [FakePart(masters_of(optimizer))])
    assert written(source) == frozenset()
    optimizer.copied.clear()
    with source.writing_back():
        optimizer._copy_main_params_to_model_params()
    assert optimizer.copied == [id(master) for master in masters_of(optimizer)]


def test_a_copy_that_fails_leaves_the_lists_and_counts_as_none():
    optimizer, source = made()
    lists = [optimizer.shard_fp32_from_float16_groups, optimizer.model_float16_groups]
    part = FakePart(masters_of(optimizer)[:2])

    def fails():
        raise RuntimeError("no memory")

    optimizer._copy_main_params_to_model_params = fails
    with pytest.raises(RuntimeError, match="no memory"):
        stepped(optimizer, source, [part])
    assert [optimizer.shard_fp32_from_float16_groups, optimizer.model_float16_groups] == lists
    assert (written(source), part.noted) == (frozenset(), 0)
    assert "step" not in vars(optimizer.optimizer)


def engine_of(optimizer, source, **settings):
    """Return an engine whose copies of masters to the model it is told of, as in training."""
    engine = NativeEngine([source], OffloadConfig(engine="native", **settings), PeakMeter())
    copy = optimizer._copy_main_params_to_model_params
    optimizer._copy_main_params_to_model_params = lambda: engine.write_back(source, copy)
    return engine


@pytest.mark.parametrize("fraction", [0.3, 1.0])
def test_under_an_engine_each_master_is_copied_once_a_step_whether_it_is_offloaded_or_not(fraction):
    optimizer, source = made()
    native, _ = with_native_weight(optimizer)
    engine = engine_of(optimizer, source, fraction=fraction)
    offloaded = [i for part in engine.parts_of(source) for i in part.ids]
    engine.begin_pass()
    engine.release()
    engine.reload()
    with engine.stepping(source):
        optimizer.optimizer.step()
        assert sorted(optimizer.copied) == sorted(offloaded), "part by part"
        optimizer._copy_main_params_to_model_params()
    assert sorted(optimizer.copied) == sorted([*map(id, masters_of(optimizer)), id(native)])
    engine.require_readable()
    pairs = zip(masters_of(optimizer), weights_of(optimizer), strict=True)
    assert all(torch.equal(weight, master.bfloat16()) for master, weight in pairs)


def test_masters_that_are_not_copied_by_part_are_on_the_gpu_for_the_copy_of_all_at_once():
    optimizer, source = made()
    optimizer.ddp_config = SimpleNamespace(fp8_param_gather=True)
    engine = engine_of(optimizer, source)
    masters = sum(slab.nbytes for slab in engine.slabs if slab.written_back)
    assert engine.schedule.holding.held_through_step == masters > 0
    engine.begin_pass()
    engine.release()
    engine.reload()
    with engine.stepping(source):
        optimizer.optimizer.step()
        assert optimizer.copied == []
        assert all(slab.gpu_bytes for slab in engine.slabs if slab.written_back)
        optimizer._copy_main_params_to_model_params()
    assert optimizer.copied == [id(master) for master in masters_of(optimizer)]


UPSTREAM = ["_state_offloader", "_optimizer_state_offloader"]


@pytest.mark.parametrize("name", UPSTREAM)
def test_an_offloader_of_mcores_own_is_found_and_dropped(name):
    optimizer, source = made()
    assert source.upstream_offloader() is None
    setattr(optimizer, name, offloader := object())
    assert source.upstream_offloader() is offloader
    source.drop_other_offloader()
    assert getattr(optimizer, name) is None
    assert source.upstream_offloader() is None
    other = next(each for each in UPSTREAM if each != name)
    assert not hasattr(optimizer, other), "mcore asks for what its generation has"


def test_an_attribute_of_the_class_is_no_offloader_of_the_optimizers():
    class Distributed(SimpleNamespace):
        _state_offloader = property(lambda self: 1 / 0)

    optimizer = Distributed(**vars(made()[0]))
    source = MegatronSource(optimizer)
    source.drop_other_offloader()
    assert source.upstream_offloader() is None
