"""mcore's activation offload races on made-up streams, and not with the waits."""

import importlib
import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.overrides
from stream_order import Race, StreamOrder

import bridge_fgo
from bridge_fgo.bridge import activation_offload
from bridge_fgo.bridge.before_training import validate_config
from bridge_fgo.memory.host_memory import power_of_two_at_least

RAN_ON = "CPU"

MODULE = "megatron.core.pipeline_parallel.fine_grained_activation_offload"
NAMES = ("qkv_linear", "core_attn", ("mlp_norm", "moe_act"))
"""Groups of a layer. One encloses the last, which takes its host buffers from PyTorch, not from mcore's pool."""
LAYERS = 3
ONE_STAGE = "F0 B0 F1 B1"
"""Microbatches' forwards and backwards in an iteration."""
FIRST_OF_TWO = "F0 F1 B0 F2 B1 F3 B2 B3"
FIRST_INTERLEAVED = "F0.0 F1.0 F0.1 F1.1 F2.0 B0.1 F3.0 B1.1 F2.1 B0.0 F3.1 B1.0 B2.1 B3.1 B2.0 B3.0"
LAST_INTERLEAVED = "F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 F2.0 B0.0 F3.0 B1.0 F2.1 B2.1 F3.1 B3.1 B2.0 B3.0"
"""The same of both stages of a pipeline with two model chunks each: `F1.0` is microbatch 1 in chunk 0."""


class Module(torch.autograd.Function):
    """Halves the squares of a matrix's elements. Backward takes two saved tensors, one of them transposed.

    Or, where it is `linear`, it takes none of those that it has saved.
    """

    @staticmethod
    def forward(ctx, tensor, order, linear):
        ctx.save_for_backward(tensor, tensor.t())
        ctx.linear = linear
        result = tensor / 2 if linear else tensor * tensor / 2
        order.write(order.place(result))
        return result

    @staticmethod
    def backward(ctx, grad):
        return (grad / 2 if ctx.linear else grad * ctx.saved_tensors[0]), None, None


class Order(StreamOrder):
    """Knows tensors' memory, and PyTorch's allocator, which hands a stream its own freed memory at once."""

    def __init__(self):
        super().__init__()
        self.iteration = 0
        self.copied = []
        """Stream and bytes of each copy."""
        self._names = itertools.count()
        self._places = {}
        self._storages = []
        """Those of each tensor: none of their addresses is used twice."""
        self._made = []
        """Storages on the GPU that are in use, with their stream and memory."""

    def place(self, tensor):
        """Return the memory of a tensor, by a name that it keeps where it is used again."""
        storage = tensor.untyped_storage()
        self._storages.append(storage)
        return self._places.setdefault(storage.data_ptr(), ("memory", next(self._names)))

    def made(self, tensor):
        """A tensor was made on the GPU, on the current stream: in the memory of one that is gone, if there is any."""
        storage = tensor.untyped_storage()
        of_stream = [made for made in self._made if made[:2] == (self.current, storage.nbytes())]
        gone = next((made for made in of_stream if torch._C._storage_Use_Count(made[2]._cdata) == 1), None)
        if gone is not None:
            self._made.remove(gone)
            self._places[storage.data_ptr()] = gone[3]
        self._made.append((self.current, storage.nbytes(), storage, self.place(tensor)))


@pytest.fixture
def offload(cpu_standins, monkeypatch):
    """Return mcore's module on made-up streams, with their `Order`."""
    from megatron.core.extensions import transformer_engine

    module, order, names = importlib.import_module(MODULE), Order(), itertools.count(1)

    class Stream:
        def __init__(self, name=None):
            self.name = next(names) if name is None else name

        def wait_event(self, event):
            assert event.iteration == order.iteration, "where an iteration is captured, an older event is no part of it"
            order.wait(self.name, event.clock)

        def wait_stream(self, stream):
            order.wait(self.name, order.clock(stream.name))

        def record_event(self, event=None):
            event = event or Event()
            event.record(self)
            return event

    class Event:
        iteration = None

        def __init__(self, external=False):
            pass

        def record(self, stream):
            self.clock, self.iteration = dict(order.clock(stream.name)), order.iteration

    def copies(target, source, non_blocking=False, real=torch.Tensor.copy_):
        if torch.overrides.has_torch_function((target, source)):
            return torch.overrides.handle_torch_function(
                copies, (target, source), target, source, non_blocking=non_blocking
            )
        order.copied.append((order.current, source.nbytes))
        order.read(order.place(source))
        order.write(order.place(target))
        return real(target, source)

    def empty(*args, pin_memory=False, device=None, real=torch.empty, **kwargs):
        tensor = real(*args, **kwargs)
        if not pin_memory:
            order.made(tensor)
        return tensor

    def taken(manager, saved, real=module.PipelineOffloadManager.on_get_saved_tensor):
        tensor = real(manager, saved)
        order.read(order.place(tensor))
        return tensor

    for name, made_up in {
        "Stream": Stream, "Event": Event, "current_stream": lambda device=None: Stream(order.current),
        "stream": lambda stream: order.on(stream.name), "is_current_stream_capturing": lambda: False,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, made_up)
    monkeypatch.setattr(module.PipelineOffloadManager, "on_get_saved_tensor", taken)
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.Tensor, "copy_", copies)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    is_managed = staticmethod(lambda tensor: not isinstance(tensor, torch.nn.Parameter))
    monkeypatch.setattr(module.ChunkOffloadHandler, "_can_manage_tensor_for_offload", is_managed)
    monkeypatch.setattr(module, "print_offload_summary_table", lambda nbytes: None)
    monkeypatch.setattr(transformer_engine, "cpu_offload", SimpleNamespace())
    yield SimpleNamespace(module=module, order=order)
    module.PipelineOffloadManager.OFFLOAD_MGR = None


def train(offload, schedule, rows=((2,) * 4,) * 3, layers=(NAMES,) * LAYERS, linear=(), kept=(0, 0, 1.0)):
    """Train by mcore's verbs, as its pipeline schedules call them.

    rows: of the matrix, in each iteration and microbatch. layers: names of each layer's groups; of one that encloses
    others first its own. linear: those of which backward takes nothing. kept: the pipeline's rank, the bytes by which
    each offloads less than the one before, and the share of groups that are offloaded.
    """
    offload.module.PipelineOffloadManager.reset_instance()
    verbs = offload.module.FineGrainedActivationOffloadingInterface
    rank, delta, fraction = kept

    def run(tensor, name, *enclosed):
        group = verbs(True, tensor, name)
        with group as tensor:
            tensor = Module.apply(tensor, offload.order, name in linear)
        for each in enclosed:
            tensor = run(tensor, each)
        return group.group_offload(tensor)

    for of_iteration in rows:
        ends = {}
        offload.order.iteration += 1
        for word in schedule.split():
            if word[0] == "B":
                ends.pop(word[1:]).sum().backward()
                continue
            microbatch, _, chunk = word[1:].partition(".")
            verbs.init_chunk_handler(rank, 2 if chunk else None, int(chunk or 0), 1, delta, fraction)
            tensor = torch.randn(of_iteration[int(microbatch)], 3, requires_grad=True)
            for names in itertools.chain(*layers):
                tensor = run(tensor, *([names] if isinstance(names, str) else names))
            ends[word[1:]] = tensor
        verbs.reset()


@pytest.fixture
def waits():
    """Return what has the patches in force but those of some methods."""

    def without(*targets):
        handle = bridge_fgo.install(bridge_fgo.OffloadConfig(activation_waits=True))
        for patch in handle._applied:
            if patch.module == MODULE and patch.target in targets:
                patch.undo()
        return handle

    return without


IN_FLIGHT = {ONE_STAGE: 1, FIRST_OF_TWO: 2, FIRST_INTERLEAVED: 5, LAST_INTERLEAVED: 3}
"""Forwards of a model chunk before their backwards, at most."""
EVERY = pytest.mark.parametrize("schedule", IN_FLIGHT)
LENGTHS = ((2, 2, 2, 2), (4, 4, 4, 4), (2, 2, 2, 2))
"""With these a pool has no spare buffer of a length, which else hides that it gives one back too early."""


@EVERY
def test_backward_copies_back_what_is_still_copied_out(offload, schedule):
    with pytest.raises(Race, match="a read"):
        train(offload, schedule)


def test_a_host_buffer_that_is_still_read_is_written(offload, waits):
    with waits("OffloadTensorPool.free"), pytest.raises(Race, match="a write"):
        train(offload, FIRST_OF_TWO, LENGTHS)


@EVERY
@pytest.mark.parametrize("rows", [((2,) * 4,) * 3, LENGTHS])
@pytest.mark.parametrize("piece_bytes", [activation_offload.PIECE_BYTES, 16])
def test_with_the_waits_nothing_races_nor_if_copies_to_the_host_are_in_pieces(
    offload, waits, schedule, rows, piece_bytes, monkeypatch
):
    monkeypatch.setattr(activation_offload, "PIECE_BYTES", piece_bytes)
    with waits():
        train(offload, schedule, rows)
    assert ({nbytes for _, nbytes in offload.order.copied} >= {8, 16}) is (piece_bytes == 16)


@EVERY
def test_what_no_backward_takes_is_copied_back_before_its_host_buffer_is_written_again(offload, waits, schedule):
    with waits():
        train(offload, schedule, LENGTHS[:1] * 2, linear=["mlp_norm"])


STAYS = {
    "all_of_a_chunk's_only_layer": {"layers": (NAMES,)},
    "the_first_groups_of_a_later_stage": {"kept": (1, 1, 1.0)},
    "all_groups": {"kept": (0, 0, 0.0)},
}
"""How to train so that mcore keeps these groups on the GPU, of the chunk whose backward runs first."""


@EVERY
@pytest.mark.parametrize("stays", STAYS)
def test_a_chunks_forward_ends_with_its_last_group_also_where_its_first_stay_on_the_gpu(
    offload, waits, schedule, stays
):
    with waits("ChunkOffloadHandler.finish_all_groups"), pytest.raises(AssertionError, match="Chunk mismatch"):
        train(offload, schedule, **STAYS[stays])
    with waits():
        train(offload, schedule, **STAYS[stays])


@pytest.fixture
def pieces(offload, monkeypatch):
    """Return what has mcore copy tensors to the host by its own verb, and tells the copies and what came back."""
    monkeypatch.setattr(activation_offload, "PIECE_BYTES", 64)
    manager = offload.module.PipelineOffloadManager
    manager.reset_instance()

    def copy(*tensors):
        handler = offload.module.ChunkOffloadHandler(1, manager.get_instance().cpu_tensor_pool)
        with torch.cuda.stream(handler.d2h_stream):
            on_host = [handler.offload(tensor)[1] for tensor in tensors]
        copied, offload.order.copied = offload.order.copied, []
        first = handler.d2h_stream.name
        return on_host, ["".join(" 2"[stream != first]) + str(nbytes) for stream, nbytes in copied]

    return copy


def of(nbytes, dtype=torch.float32):
    return torch.arange(nbytes // dtype.itemsize).to(dtype)


def test_no_stream_gets_more_bytes_than_a_piece_before_another_has_its_turn(waits, pieces):
    tensors = [of(200), of(40), of(24), of(48), of(65, torch.uint8)]
    with waits():
        on_host, copied = pieces(*tensors)
    assert copied == ["264", " 64", "264", " 8", " 40", "224", " 48", "264", " 1"]
    for tensor, copy in zip(tensors, on_host, strict=True):
        assert torch.equal(tensor, copy)


def test_copies_that_mcore_delays_until_after_a_layers_graph_have_no_gradients(waits, pieces):
    """Hooks of saved tensors get these as they are; mcore's forward flushes what it has delayed."""
    saved = of(200).requires_grad_() * 1
    for tensors in ([saved], [saved, saved]):  # whose buffers are taken again
        with waits():
            on_host, copied = pieces(*tensors)
        assert copied.count("264") >= 2
        assert all(torch.equal(copy, saved) and not copy.requires_grad for copy in on_host)


def test_what_is_no_plain_row_of_bytes_is_copied_as_mcore_does(waits, pieces, monkeypatch):
    class Quantized(torch.Tensor):
        pass

    turned, empty = of(256).view(8, 8).t(), torch.empty(3, 0)
    with waits():
        on_host, copied = pieces(turned, empty)
        assert copied == ["264", " 64", "264", " 64", " 0"] and torch.equal(on_host[0], turned)
        assert on_host[1].shape == empty.shape
        assert pieces(of(256).as_subclass(Quantized))[1] == [" 256"]
        for captures in ("torch.cuda.is_current_stream", "megatron.core.transformer.cuda_graphs.is_graph"):
            with monkeypatch.context() as patch:
                patch.setattr(f"{captures}_capturing", lambda: True)
                assert pieces(of(256))[1] == [" 256"]


def test_another_config_in_the_process_takes_no_waits_from_a_training_that_runs(offload):
    other = SimpleNamespace(optimizer=SimpleNamespace(offload_optimizer_states=False))
    with bridge_fgo.install():
        activation_offload.add_waits()  # as a session does
        validate_config(lambda: None, other, (), {})
        train(offload, ONE_STAGE)


def test_a_residency_that_is_asked_for_the_waits_adds_them_until_it_is_closed():
    config = bridge_fgo.OffloadConfig(activation_waits=True)
    with pytest.raises(ValueError, match=r"activation_waits=True\)\): call bridge_fgo\.install\(\) first"):
        bridge_fgo.Residency(torch.nn.Linear(3, 2), config=config)
    with bridge_fgo.install():
        res = bridge_fgo.Residency(torch.nn.Linear(3, 2), config=config)
    assert list(activation_offload.askers) == [res]
    res.close()
    assert not activation_offload.askers


def test_an_mcore_without_one_of_the_methods_is_refused_where_the_waits_are_asked_for(offload, monkeypatch):
    model = SimpleNamespace(fine_grained_activation_offloading=True)
    activation_offload.refuse_unwaited(model)
    monkeypatch.delattr(offload.module.OffloadTensorPool, "free")
    with pytest.raises(ValueError, match=r"this mcore has no OffloadTensorPool\.free .*set model"):
        activation_offload.refuse_unwaited(model)
    model.fine_grained_activation_offloading = False
    activation_offload.refuse_unwaited(model)


@pytest.fixture
def host(monkeypatch):
    """A host with so many bytes for each rank that new host copies take them: PyTorch's blocks are powers of two."""
    host = SimpleNamespace(free=0, taken=[])
    monkeypatch.setattr(activation_offload, "free_for_each_rank", lambda: host.free)
    empty = torch.empty

    def takes(*args, pin_memory=False, **kwargs):
        tensor = empty(*args, **kwargs)
        if pin_memory:
            host.taken.append(power_of_two_at_least(tensor.nbytes))
            host.free -= host.taken[-1]
            assert host.free >= 0, "the kernel would kill the job"
        return tensor

    monkeypatch.setattr(torch, "empty", takes)
    return host


@EVERY
def test_host_memory_for_activations_that_a_node_has_not_is_refused_in_the_first_iteration(
    offload, waits, host, monkeypatch, schedule
):
    of_pool = [NAMES[:2]] * LAYERS
    host.free = 10**6
    with waits():
        train(offload, schedule, layers=of_pool)
        host.free = needed = sum(host.taken)
        assert needed == IN_FLIGHT[schedule] * LAYERS * 2 * 2 * 32, (
            "as `plan` counts it: groups, tensors, bytes of each"
        )
        train(offload, schedule, layers=of_pool)
        assert host.free == 0, "a buffer that a copy has left free is taken again"
        host.free = needed - 1
        monkeypatch.setattr(activation_offload, "_pinned_for_states", 0)
        monkeypatch.setattr(activation_offload, "_are_added", False)
        for nbytes in (3 * 2**30, 0):  # of a session, then of a config that knows of none
            activation_offload.add_waits(nbytes)
        with pytest.raises(ValueError, match=r"3\.00 GiB for optimizer states: take modules out of model\.offload"):
            train(offload, schedule, layers=of_pool)
        host.free = needed
        with pytest.raises(ValueError, match=r"each rank of this node can have 0\.00 GiB"):
            train(offload, schedule, LENGTHS, layers=of_pool)  # of another length mcore makes buffers later


def test_host_memory_for_activations_of_experts_is_refused_too_in_the_first_iteration(
    offload, waits, host, monkeypatch
):
    with waits(), monkeypatch.context() as patch:
        asked, host.free = [], 10**6
        patch.setattr(activation_offload, "free_for_each_rank", lambda: asked.append(offload.order.iteration) or 10**6)
        train(offload, ONE_STAGE, layers=[("moe_act",)] * 2)
        assert {*asked} == {1} and offload.order.iteration == 3
    host.free = 0
    with waits(), pytest.raises(ValueError, match=r"mcore pins .* each rank of this node can have 0\.00 GiB"):
        train(offload, ONE_STAGE, layers=[("moe_act",)])


def test_host_memory_for_layers_that_transformer_engine_offloads_is_asked_for_before_a_copy(monkeypatch, cpu_standins):
    """Transformer Engine's own class is not here: what is wrapped is a method of an object with its fields."""
    free = 2 * 64 + 16
    monkeypatch.setattr(activation_offload, "free_for_each_rank", lambda: free)
    monkeypatch.setattr(activation_offload, "_are_added", True)
    saved, copied = torch.zeros(11), []  # 44 bytes: a block of 64
    of_first = [saved, saved, saved.clone(), saved[:3]]
    layer = SimpleNamespace(fwd_gpu_tensor_group=SimpleNamespace(tensor_list=[]))

    def offload():
        activation_offload.offloads_layer(lambda: copied.append(free), layer, (), {})

    offload()
    assert copied == [free], "without gradients nothing is saved"
    layer.fwd_gpu_tensor_group.tensor_list = of_first
    offload()
    free = 0
    offload()
    assert copied == 2 * [2 * 64 + 16] + [0], "the second time its blocks are there"
    layer.fwd_gpu_tensor_group.tensor_list = [torch.zeros(64)]
    free = 255
    with pytest.raises(ValueError, match=r"each rank of this node can have"):
        offload()
    free += 1
    offload()
    assert copied[3:] == [256], "a longer one takes a block more"
    layer.fwd_gpu_tensor_group.tensor_list = of_first
    free = 0
    offload()
    layer = SimpleNamespace(fwd_gpu_tensor_group=layer.fwd_gpu_tensor_group)
    free = 2 * 64 + 15
    with pytest.raises(
        ValueError, match=r"model\.cpu_offloading=True: Transformer Engine pins .* lower model\.cpu_offl"
    ):
        offload()
    assert len(copied) == 5
