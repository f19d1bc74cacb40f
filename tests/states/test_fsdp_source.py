"""What Megatron-FSDP keeps of an optimizer's states, as a source; and that no memory of a moved state stays behind."""

import fused_adam
import pytest
from cpu_training import CpuOptions, CpuTraining
from torch.multiprocessing.reductions import StorageWeakRef

import bridge_fgo
from bridge_fgo.memory.layout import lay_out, offloaded_bundles
from bridge_fgo.states.fsdp import FsdpSource, parameter_groups

pytestmark = pytest.mark.usefixtures("cpu_standins")


@pytest.fixture
def run():
    with CpuTraining(CpuOptions(fsdp="optim_grads_params", swiglu=True)) as training:
        training.step()
        yield training


def test_masters_are_one_slab_for_each_parameter_group_and_half_of_the_bytes_is_whole_groups(run):
    source = FsdpSource(run.optimizer)
    everything = source.states()
    groups = parameter_groups(run.optimizer)
    storages = {id(group): group.main_weight_buffer.data.untyped_storage()._cdata for group in groups}
    assert len(everything) == sum(len(group.params) for group in groups)
    assert [len(bundle.states) for bundle in everything] == [3] * len(everything)
    chosen = offloaded_bundles(everything, bridge_fgo.OffloadConfig())
    masters = [slab for part in lay_out(chosen, 2**10) for slab in part.slabs if slab.written_back]
    assert len(masters) == len(groups)
    for slab in masters:
        (storage,) = {state.read().untyped_storage()._cdata for state in slab.states}
        assert storage in storages.values()
        read = [state.read().storage_offset() * 4 for state in slab.states]
        assert slab.layout.offsets == read and len(set(read)) == len(read)

    everything = FsdpSource(run.optimizer).states()
    chosen = offloaded_bundles(everything, bridge_fgo.OffloadConfig(fraction=0.5))
    assert 0 < len(chosen) < len(everything)
    ids = {id(bundle.param) for bundle in chosen}
    for group in parameter_groups(run.optimizer):
        params = {id(param) for param in group.params}
        own = {id(bundle.param) for bundle in everything if id(bundle.param.orig_param) in params}
        assert own <= ids or not own & ids


def test_the_copy_to_the_weights_is_divided_by_parameter_groups_and_not_where_it_quantizes(run):
    source = FsdpSource(run.optimizer)
    groups = parameter_groups(run.optimizer)
    assert source.writes_back_by_part
    groups[0].dtype = "float8"
    assert not source.writes_back_by_part


def test_no_memory_of_a_moment_stays_behind_where_the_adam_inside_made_it_a_view(monkeypatch):
    # As Transformer Engine does, by DTensor.from_local.
    fused_adam.have_mcore_take_it(monkeypatch.setattr)
    with (
        bridge_fgo.install(bridge_fgo.OffloadConfig(engine="native")),
        CpuTraining(CpuOptions(fsdp="optim_grads_params", offload=True)) as run,
    ):
        made, plain = [], fused_adam.zeros_like

        def zeros_like(param):
            tensor = plain(param)
            assert tensor._local_tensor._base is not None
            made.append(StorageWeakRef(tensor._local_tensor.untyped_storage()))
            return tensor

        monkeypatch.setattr(fused_adam, "zeros_like", zeros_like)
        run.step()
        run.step()
        assert made and not [one for one in made if not one.expired()]
