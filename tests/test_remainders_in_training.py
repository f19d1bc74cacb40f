"""Masters that are copied in part, in Bridge's own step: who may change the weights meanwhile, and who may not."""

import pytest
import torch
from both import as_resident, session_of, steps

from bridge_fgo.memory.slab import SlabState

pytestmark = pytest.mark.usefixtures("cpu_standins")


def test_a_changed_weight_ends_the_step_before_any_update_of_a_chain_and_training_goes_on_when_it_is_put_back():
    with as_resident(3, experts=True) as run:
        steps(run, 3)
        engine = session_of(run).engine
        slabs = [slab for part in engine._offloaded[engine.sources[-1]].parts for slab in part.slabs]
        slab = next(slab for slab in slabs if slab.is_encoded and slab.state is SlabState.RELEASED)
        weight = slab.codec.shards[0].tensor()
        kept = weight.clone()
        weight[5] += 1
        before = [parameter.detach().clone() for parameter in run.model[0].parameters()]
        with pytest.raises(RuntimeError, match="weights of the model were changed while"):
            run.step()
        assert len(engine.sources) == 2
        assert all(torch.equal(a, b) for a, b in zip(before, run.model[0].parameters(), strict=True))
        weight.copy_(kept)
