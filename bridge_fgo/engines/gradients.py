"""The gradients of a rank, in DDP's buffers: without memory until a backward needs it, and off between microbatches.

The time line of a step:

1.  Bridge zeroes the gradients: `zero`. No bucket has memory (ABSENT).
2.  A backward reads `main_grad` of a parameter, to add to it. Its bucket is allocated and zeroed:
    `GradientBucket.require`.
3.  Something was added to all gradients of a bucket. If this is not the last microbatch, its copy out starts at the
    next point, and its memory is freed once the copy is over: `point`. That of the embeddings starts as the next
    forward begins. At most `MOST_LEAVING` buckets are under way: none at the end of the next forward, where
    activations peak.
4.  As the last layer of the next microbatch runs forward, the first bucket of its backward is prefetched; and each
    bucket that this backward needs has the next one prefetched, in the order of the backward before.
5.  DDP reduces the buckets: `reduce`. From here on all stay until the next step zeroes them.

None of this decides what is right: code that reads a gradient that is not on the GPU waits until it is.
"""

from collections import deque
from collections.abc import Iterable
from typing import Any

import torch

from bridge_fgo.memory.gradient_bucket import BucketState, GradientBucket
from bridge_fgo.memory.guard import Guard, Views, class_of, empty, fill, lies_in
from bridge_fgo.memory.host_buffer import HostBuffer
from bridge_fgo.memory.meters import Traffic
from bridge_fgo.memory.transfers import Transfers, wait_for_a_while
from bridge_fgo.offload.profile import Mark

MANAGED = "_bridge_fgo_gradients"  # attribute of a buffer and of a bucket group: the `Gradients` that has it

MOST_LEAVING = 4  # buckets whose copies out may be under way; most of DDP's, of 0.16 GB, have a layer or less

AHEAD = 1
"""Buckets that are prefetched ahead of the one that a backward needs, and layers before the end of a forward at which
the first one is. A layer's backward takes ten times as long as the copy of its gradients if they hide at all."""

LARGEST_SHARE = 4
"""A bucket with more than a fourth of all gradients stays: it would be back for most of each backward. mcore makes one
bucket of all on later pipeline stages."""

QUANTIZED = ("Float8Tensor", "Float8BlockwiseQTensor", "NVFP4Tensor")
"""Transformer Engine's classes of weights that work, by their exact names. MXFP8's share memory with gradients."""

WHOLE = (
    "the gradients of a whole DDP buffer (`buffer.grad_data`) were used; each bucket has its own, in "
    "`bucket.grad_data`, and each parameter in `main_grad`: use these, or set OffloadConfig.gradients=False"
)


class Gradients:
    """The gradients of some DDP models, bucket by bucket, offloaded between microbatches if it `offloads`.

    The contents of the buffers are dropped: a training step zeroes them before anything else. Other `Gradients` of an
    optimizer that was built before are closed first. ValueError if gradients are off the GPU, or weights are of an
    unknown class: MXFP8's, say.
    """

    def __init__(self, ddps: Iterable[Any], transfers: Transfers, offloads: bool) -> None:
        ddps = list(ddps)
        for buffer in (buffer for ddp in ddps for buffer in _buffers(ddp)):
            if (others := gradients_of(buffer)) is not None:
                others.close()
            if not buffer.grad_data.untyped_storage().nbytes():
                raise ValueError(
                    "OffloadConfig.gradients with a model whose gradients are off the GPU: call "
                    "Residency.reload('grads'), or the reload_from_cpu() of DDP's buffers, before training is set up"
                )
            for cls in {class_of(param) for param in buffer.params} - {torch.nn.Parameter}:
                if cls.__name__ not in QUANTIZED:
                    raise ValueError(
                        f"OffloadConfig.gradients with weights of {cls.__name__}: of weights that are no "
                        f"torch.nn.Parameter, those of Transformer Engine's {', '.join(QUANTIZED)} are known to work; "
                        "set OffloadConfig.gradients=False"
                    )
        self.traffic = Traffic()
        self.interrupted = False  # whether an error has ended the newest pass
        self.transfers = transfers
        # mcore's, by `id`, with their buckets, and the guard of what is of several buckets
        self.by_buffer: dict[int, tuple[Any, list[GradientBucket], Guard]] = {}
        self._bucket_of: dict[int, GradientBucket] = {}  # by the `id` of mcore's bucket
        self._group_of: dict[GradientBucket, Any] = {}  # mcore's bucket group of each
        self._in_use: list[GradientBucket] = []  # those that a backward has brought, and that are to leave
        self._leaving: deque[GradientBucket] = deque()
        self._forwards: deque[int] = deque([-1], maxlen=AHEAD + 1)  # the layers whose forward began last
        self._lead = -1  # the first of them in the present backward: the next such prefetches from there on
        self._orders: dict[int, list[GradientBucket]] = {}  # the buckets that a backward needed, in order, by its lead
        self._needed: list[GradientBucket] = []  # those that the present backward has needed; none before it begins
        for group in (group for ddp in ddps for group in _groups(ddp)):
            _forget_shards(group)
        others = {id(buffer): _views_of(buffer) for ddp in ddps for buffer in _buffers(ddp)}
        for ddp in ddps:
            for buffer in _buffers(ddp):
                self._take(buffer, others[id(buffer)].find())
            for group in _groups(ddp):
                vars(group)[MANAGED] = self
                self._group_of.update((self._bucket_of[id(bucket)], group) for bucket in group.buckets)
        self.nbytes = sum(bucket.nbytes for bucket in self.buckets)
        self._moving = {b for b in self.buckets if offloads and LARGEST_SHARE * b.nbytes <= self.nbytes}
        for bucket in self._moving:
            bucket.moves = True

    def _take(self, buffer: Any, others: list[torch.Tensor]) -> None:
        mine = []
        extra = {id(tensor) for tensor in buffer.extra_main_grads}  # they have memory of their own, and keep it
        for bucket in buffer.buckets:
            params = [param for param in bucket.params_list if id(param.main_grad) not in extra]
            data = bucket.grad_data
            views = _gradients_in(buffer, bucket) + [view for view in others if lies_in(view, data)]
            others = [view for view in others if not lies_in(view, data)]
            mine.append(GradientBucket(data, views, params, self.transfers, self.needed, self.traffic))
            self._bucket_of[id(bucket)] = mine[-1]
        guard = Guard(self._whole_is_used)
        self.by_buffer[id(buffer)] = buffer, mine, guard
        vars(buffer)[MANAGED] = self
        guard.put_on([buffer.grad_data, *others])
        empty(buffer.grad_data.untyped_storage(), WHOLE)

    def _whole_is_used(self, tensor: torch.Tensor) -> None:
        raise RuntimeError(WHOLE)

    @property
    def offloads(self) -> bool:
        """Whether any gradients are offloaded between microbatches."""
        return bool(self._moving)

    @property
    def buckets(self) -> list[GradientBucket]:
        """All buckets."""
        return [bucket for _, buckets, _ in self.by_buffer.values() for bucket in buckets]

    @property
    def moving_bytes(self) -> int:
        """Bytes that are offloaded between microbatches."""
        return sum(bucket.nbytes for bucket in self._moving)

    def map_hosts(self) -> list[HostBuffer]:
        """Map a host buffer for each bucket that is offloaded; return them, to be page-locked."""
        return [host for bucket in self.buckets if bucket in self._moving for host in bucket.map_host()]

    @property
    def pinned_bytes(self) -> int:
        """Pinned host memory."""
        return sum(bucket.pinned_bytes for bucket in self.buckets)

    def begin_pass(self) -> None:
        """Begin a pass on the current stream, before its gradients are zeroed."""
        if self.interrupted:
            # Race: nobody has waited for a reduction that was under way, and memory is freed.
            self.transfers.finish_all()
        self.interrupted = False
        self.transfers.begin_pass()
        for group in {id(group): group for group in self._group_of.values()}.values():
            for bucket, shards in zip(group.buckets, group.cached_grad_buffer_shard_list, strict=True):
                if (one := self._bucket_of.get(id(bucket))) is not None:
                    one.know_shards(shards)

    def stay(self, room: int) -> tuple[int, int]:
        """Keep the buckets that fit into `room` bytes on the GPU; return their bytes, and those of the others."""
        before = self.moving_bytes
        for bucket in sorted(self._moving, key=lambda bucket: bucket.nbytes, reverse=True):
            if bucket.nbytes <= room:
                room -= bucket.nbytes
                self._moving.discard(bucket)
                bucket.moves = False
        self._orders.clear()
        return before - self.moving_bytes, self.moving_bytes

    # Called in mcore's methods of buffers and bucket groups: zero, scale, reduce.

    def zero(self, buffer: Any) -> None:
        """Make the gradients of a buffer zero, without memory."""
        for bucket in self.by_buffer[id(buffer)][1]:
            bucket.zero()
        for tensor in buffer.extra_main_grads:
            tensor.zero_()
        self._in_use.clear()
        self._leaving.clear()
        self._needed = []

    def guard_views(self) -> None:
        """Guard views of gradients that are zero, once mcore has none: its optimizers' are gone only after `zero`."""
        for bucket in self.buckets:
            bucket.guard_views()

    def scale(self, buffer: Any, factor: float) -> None:
        """Scale the gradients of a buffer; zeros stay as they are."""
        for bucket, mine in zip(buffer.buckets, self.by_buffer[id(buffer)][1], strict=True):
            if mine.state is not BucketState.ABSENT:
                mine.require()
                bucket.grad_data.mul_(factor)
        for tensor in buffer.extra_main_grads:
            tensor.mul_(factor)

    def reduce(self, group: Any) -> None:
        """Make the buckets of a group resident to be reduced, also those that no backward has reached."""
        mine = [one for bucket in group.buckets if (one := self._bucket_of.get(id(bucket))) is not None]
        for one in mine:
            one.require()
        # Race: a copy out would read, and its release free, what the collective still writes: `is_last_microbatch` may
        # be reset before that is over: mcore may align the reductions of pipeline stages.
        self._in_use = [bucket for bucket in self._in_use if bucket not in mine]

    # A pass.

    def needed(self, bucket: GradientBucket) -> None:
        """Note that a backward needs a bucket, and prefetch what it will need next."""
        if bucket not in self._moving:
            return
        self._in_use.append(bucket)
        if not self._needed:
            self._lead = self._forwards[0]
        self._needed.append(bucket)
        order, place = self._orders.get(self._lead, []), len(self._needed)
        if order[place - 1 : place] == [bucket]:
            self._prefetch(order[place:])

    def _prefetch(self, buckets: list[GradientBucket]) -> None:
        for bucket in buckets[:AHEAD]:
            if bucket.state is BucketState.OFFLOADED:
                try:
                    bucket.reload()
                except torch.OutOfMemoryError:
                    return  # the backward asks again

    def point(self, mark: Mark) -> None:
        """Pass a point: a layer begins its forward, or has ended its backward."""
        if not self._moving:
            return
        with self.transfers.on_compute_stream():
            if mark.layer < 0:
                self._send_off([bucket for bucket in self._in_use if not self._group_of[bucket].is_last_microbatch])
                self._release(MOST_LEAVING)
            elif torch._C._current_graph_task_id() < 0:  # else it runs once more, within a backward
                self._send_off(self._in_use)  # what the backward before used after its last layer: the embedding
                self._begin_forward(mark.layer)

    def _begin_forward(self, layer: int) -> None:
        if self._needed:
            self._orders[self._lead] = self._needed
            self._needed = []
        self._forwards.append(layer)
        if layer in self._orders:
            self._release(0)
            self._prefetch(self._orders[layer])
        else:
            self._release(MOST_LEAVING)

    def _send_off(self, buckets: list[GradientBucket]) -> None:
        staying = []
        for bucket in buckets:
            if bucket.state is not BucketState.HERE:
                continue  # it is under way already
            # By the time of a point, kernels that add to what was read before are enqueued; with nothing read, somebody
            # has used gradients that he holds.
            if bucket.is_complete or not bucket.read:
                bucket.offload()
                self._leaving.append(bucket)
            else:
                staying.append(bucket)
        self._in_use = staying

    def _release(self, most: int) -> None:
        """Free buckets whose copies are over; wait for others until there are at most so many."""
        while self._leaving:
            bucket = self._leaving[0]
            if bucket.state is BucketState.OFFLOADING:
                if len(self._leaving) <= most and not self.transfers.has_left(bucket):
                    return
                bucket.release()
            self._leaving.popleft()

    # The end.

    def close(self) -> None:
        """Move each buffer's gradients back to one storage; OutOfMemoryError leaves the rest as they are.

        TimeoutError if work on the GPU does not end, as a reduction that another rank has left: all stay then.
        """
        # Race: nobody may have waited for a reduction that is under way, nor, after an error, for who adds.
        wait_for_a_while(self.transfers.finish_all)
        # Race: the memory of the buckets is the training stream's, which would reuse it before others have read it.
        with self.transfers.computing(), torch.no_grad():
            for given in list(self.by_buffer.values()):
                self._give_back(*given)
        for group in self._group_of.values():
            vars(group).pop(MANAGED, None)
        self._group_of.clear()  # closed once more, they would lose what has taken them since
        self._moving.clear()

    def _give_back(self, buffer: Any, mine: list[GradientBucket], guard: Guard) -> None:
        for one in mine:
            one.asleep = ""
            if one.state is not BucketState.ABSENT:
                one.require()
        whole = buffer.grad_data
        fill(whole.untyped_storage(), whole.numel() * whole.element_size(), WHOLE)
        # From here on nothing takes memory.
        guard.take_off()
        for bucket, one in zip(buffer.buckets, mine, strict=True):
            place = whole[bucket.offset : bucket.offset + bucket.grad_data.numel()]
            if one.state is BucketState.ABSENT:
                place.zero_()
            else:
                place.copy_(bucket.grad_data)
            one.close(place)
            self._bucket_of.pop(id(bucket), None)
            _forget_shards(self._group_of[one])
        del self.by_buffer[id(buffer)], vars(buffer)[MANAGED]


def _groups(ddp: Any) -> list[Any]:
    return [*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups]


def _gradients_in(buffer: Any, bucket: Any) -> list[torch.Tensor]:
    """Return the gradients that a bucket has in the memory of its buffer."""
    extra = {id(tensor) for tensor in buffer.extra_main_grads}
    return [
        param.main_grad_copy_in_grad_buffer if id(param.main_grad) in extra else param.main_grad
        for param in bucket.params_list
    ]


def _views_of(buffer: Any) -> Views:
    views = Views(buffer.grad_data, users=2, is_owners=False)  # by itself, and by a storage that is asked for
    for bucket in buffer.buckets:
        views.add([bucket.grad_data, *_gradients_in(buffer, bucket)])
    return views


def _buffers(ddp: Any) -> list[Any]:
    return [*ddp.buffers, *ddp.expert_parallel_buffers]


def _forget_shards(group: Any) -> None:
    """Make mcore's bucket group slice the shards of gradients anew."""
    group.cached_grad_buffer_shard_list = [None] * len(group.buckets)


def gradients_of(owner: Any) -> Gradients | None:
    """Return the `Gradients` that a buffer or a bucket group of mcore's belongs to; None if mcore keeps them."""
    return vars(owner).get(MANAGED)


def buckets_of(buffer: Any) -> list[GradientBucket]:
    """Return the buckets of a buffer of mcore's whose gradients are managed; none if mcore keeps them."""
    gradients = gradients_of(buffer)
    return [] if gradients is None else gradients.by_buffer[id(buffer)][1]
