"""What every rank of a job does together when training attaches, whatever its own optimizers are; budgets, stages."""

from types import SimpleNamespace

import pytest
import torch
from loop import Loop, RecordingEngine, make_chain

import bridge_fgo
from bridge_fgo.bridge import before_training, session
from bridge_fgo.bridge.optimizers import stage_of
from bridge_fgo.bridge.session import SESSION, attach
from bridge_fgo.engines import ranks
from bridge_fgo.engines.lease import LEASE
from bridge_fgo.engines.ranks import agree
from bridge_fgo.memory.host_memory import Need

CONFIG = bridge_fgo.OffloadConfig(engine="native")


class PinningEngine(RecordingEngine):
    bytes_to_pin = 100

    def pin(self):
        self.events.append("pin")


@pytest.fixture
def told(monkeypatch):
    """What this rank has told, one entry for each collective; `told.others` is how a second rank fails in each."""

    class Told(list):
        others = ()

    def gather(own):
        theirs = told.others[len(told)] if len(told) < len(told.others) else None
        need, failure = own
        told.append(need.nbytes if isinstance(need, Need) else failure)
        return [own] if theirs is None else [own, (None, theirs)]

    told = Told()
    monkeypatch.setattr(ranks, "gather", gather)
    return told


@pytest.fixture
def loop(monkeypatch, bridge_train):
    loop = Loop(monkeypatch, bridge_train)
    loop.leaf._state_offloader = "mcore's"
    monkeypatch.setattr(session, "make_engine", lambda name, sources, *how: PinningEngine(sources, loop.events))
    return loop


ALIKE = [None, 100, None]
"""That the engine could be made, the bytes that are to be pinned, as the host could be asked, and that they are."""


def test_a_rank_tells_what_it_needs_before_it_pins_and_drops_mcores_own_offloader(loop, told):
    for _ in range(2):
        attach(loop.optimizer, loop.model_config, CONFIG)
        assert told == ALIKE and loop.events == ["pin"], "once"
    assert LEASE in vars(loop.leaf) and loop.leaf._state_offloader is None


@pytest.mark.parametrize("engine", ["native", "mcore generation 1"])
def test_a_rank_that_pins_nothing_takes_part_in_as_many_collectives(monkeypatch, told, cpu_standins, engine):
    monkeypatch.setattr(session, "choose_engine", lambda *how: engine)
    made = attach(make_chain([SimpleNamespace(is_stub_optimizer=True)], None), SimpleNamespace(), CONFIG)
    assert made.engine.name == engine and told == [None, 0, None]


def test_a_rank_with_a_refusal_of_its_own_tells_it_once_and_goes(loop, told):
    loop.leaf.config.optimizer = "sgd"
    with pytest.raises(ValueError, match="only the states of Adam and Muon"):
        attach(loop.optimizer, loop.model_config, CONFIG)
    ((is_value, text),) = told
    assert is_value and "only the states of Adam and Muon" in text


def test_a_part_of_the_model_is_refused_for_its_own_config(loop, told):
    part = torch.nn.Linear(1, 1)
    vars(part)["config"] = SimpleNamespace(expert_gtp_weight_remat_size=2)
    with pytest.raises(ValueError, match=r"^model\.expert_gtp_weight_remat_size=2 with optimizer\.offload_optimizer"):
        attach(loop.optimizer, loop.model_config, CONFIG, torch.nn.Sequential(part))


@pytest.mark.parametrize(
    ("others", "events"),
    [([(True, "ValueError: theirs")], []), ([None, None, (True, "ValueError: theirs")], ["pin"])],
    ids=["making", "pinning"],
)
def test_what_fails_on_another_rank_fails_here_and_leaves_nothing_attached(loop, told, others, events):
    told.others = others
    with pytest.raises(ValueError, match="rank 1 failed, and so every rank does: ValueError: theirs"):
        attach(loop.optimizer, loop.model_config, CONFIG)
    assert loop.events == events
    assert LEASE not in vars(loop.leaf) and SESSION not in vars(loop.optimizer)
    assert loop.leaf._state_offloader == "mcore's"


def test_a_rank_that_trains_nothing_attaches_when_the_others_do(told, installed):
    from megatron.core.optimizer.optimizer import ChainedOptimizer

    config = SimpleNamespace(optimizer="adam", use_distributed_optimizer=True, offload_optimizer_states=True)

    def build(optimizer_config):
        return ChainedOptimizer([]), "scheduler"

    def update(optimizer, model_config):
        pass

    optimizer, _ = before_training.build_optimizer(build, None, (config,), {})
    before_training.after_model_hooks(update, None, (optimizer, SimpleNamespace()), {})
    assert told == [None, 0, None]


@pytest.mark.parametrize("as_list", [False, True])
def test_the_stage_is_that_of_the_models_own_group_where_mcore_has_no_global_state(cpu_standins, as_list):
    group = SimpleNamespace(rank=lambda: 3)
    chunk = SimpleNamespace(pp_group=[group, group] if as_list else group)
    assert stage_of([SimpleNamespace(model_chunks=[SimpleNamespace(), chunk])]) == 3
    assert stage_of([SimpleNamespace()]) is None


def test_each_stage_keeps_what_its_fullest_rank_can_and_the_budget_is_that_of_the_fullest_of_all(monkeypatch):
    others = [(0, 10, 70), (0, 12, 70), (1, 0, 90), (None, 50, 20)]
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: len(others) + 1)

    def gather(answers, own):
        answers[:] = [*others, own]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    assert agree(0, 11, 60) == (10, 90)
    assert agree(1, 30, 60) == (0, 90)
    assert agree(None, 30, 60) == (30, 90)
