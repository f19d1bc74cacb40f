"""mcore's DDP as `Gradients` sees it, without Megatron, with twins of its gradients that are never moved."""

from types import SimpleNamespace

import torch

from bridge_fgo.engines.gradients import Gradients
from bridge_fgo.offload.profile import Mark

PARAMS = 3
"""Parameters of a bucket."""
NUMEL = 8
"""Elements of a parameter."""


class Owner:
    """A buffer, a bucket or a bucket group: something with attributes."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)


class FakeDdp:
    """A DDP of some buffers, of some buckets each; a layer has one bucket's parameters, layer 0 those of the last.

    extra: buckets, by their place in all, whose first parameter accumulates in memory of its own.
    make: returns a parameter's tensor of a shape.
    """

    def __init__(self, buckets=(5,), extra=(), make=torch.zeros):
        self.buffers, self.expert_parallel_buffers = [], []
        self.bucket_groups, self.expert_parallel_bucket_groups = [], []
        self.params, self.twins = [], []
        self.is_zeroing = False
        """Whether zeroing has begun and not ended."""
        for count in buckets:
            self._add_buffer(count, extra, make)

    def _add_buffer(self, count, extra, make):
        numel = PARAMS * NUMEL
        whole = torch.zeros(count * numel)
        buffer = Owner(grad_data=whole, extra_main_grads=[], buckets=[], params=[])
        for number in range(count):
            data = whole[number * numel : (number + 1) * numel]
            params = [torch.nn.Parameter(make(2, NUMEL // 2)) for _ in range(PARAMS)]
            places = {param: (i * NUMEL, (i + 1) * NUMEL) for i, param in enumerate(params)}
            for param, (start, end) in places.items():
                param.main_grad = data[start:end].view(param.shape)
            if len(self.bucket_groups) in extra:
                params[0].main_grad_copy_in_grad_buffer = params[0].main_grad
                params[0].main_grad = torch.zeros(params[0].shape)
                buffer.extra_main_grads.append(params[0].main_grad)
            bucket = Owner(grad_data=data, offset=number * numel, params_list=params, param_to_index=places)
            buffer.buckets.append(bucket)
            buffer.params += params
            group = Owner(buckets=[bucket], is_last_microbatch=False, cached_grad_buffer_shard_list=[None])
            self.bucket_groups.append(group)
        self.buffers.append(buffer)
        self.params += buffer.params
        self.twins += [torch.zeros(param.shape) for param in buffer.params]

    @property
    def buckets(self):
        return [bucket for buffer in self.buffers for bucket in buffer.buckets]

    def of_bucket(self, number):
        """The places of a bucket's parameters."""
        return range(number * PARAMS, (number + 1) * PARAMS)

    def add(self, place, value):
        """Add to a gradient, as a backward does, and to its twin."""
        self.params[place].main_grad.add_(value)
        self.twins[place].add_(value)

    def reduce(self, number, factor=0.5):
        """Reduce a bucket as mcore does, by a view of a shard that it keeps; returns what ends the collective.

        As mcore's own patched function would, `Gradients.reduce` is called first.
        """
        group, bucket = self.bucket_groups[number], self.buckets[number]
        if (gradients := vars(group).get("_bridge_fgo_gradients")) is not None:
            gradients.reduce(group)
        extra = [p for p in bucket.params_list if hasattr(p, "main_grad_copy_in_grad_buffer")]
        for param in extra:
            param.main_grad_copy_in_grad_buffer.copy_(param.main_grad)
        if group.cached_grad_buffer_shard_list[0] is None:
            group.cached_grad_buffer_shard_list[0] = list(bucket.grad_data.chunk(2))
        shards = group.cached_grad_buffer_shard_list[0]
        for place in self.of_bucket(number):
            self.twins[place].mul_(factor)

        def finish():
            for shard in shards:
                shard.mul_(factor)
            for param in extra:
                param.main_grad.copy_(param.main_grad_copy_in_grad_buffer)

        return finish

    def zero(self):
        """Zero all gradients, by who has them."""
        self.is_zeroing = True
        for buffer in self.buffers:
            if (gradients := vars(buffer).get("_bridge_fgo_gradients")) is not None:
                gradients.zero(buffer)
            else:
                buffer.grad_data.zero_()
                for extra in buffer.extra_main_grads:
                    extra.zero_()
        for twin in self.twins:
            twin.zero_()
        self.is_zeroing = False

    def scale(self, factor):
        for buffer in self.buffers:
            vars(buffer)["_bridge_fgo_gradients"].scale(buffer, factor)
        for twin in self.twins:
            twin.mul_(factor)

    def different(self):
        """Return the places of the gradients that are not equal to their twins."""
        pairs = zip(self.params, self.twins, strict=True)
        return [place for place, (param, twin) in enumerate(pairs) if not torch.equal(param.main_grad, twin)]


def taken(ddp, transfers, offloads=True):
    """Return the `Gradients` of a DDP, with host memory."""
    gradients = Gradients([ddp], transfers, offloads)
    gradients.map_hosts()
    return gradients


def forward(ddp, gradients):
    """Run the points of a forward: a layer a bucket, the last bucket's first."""
    for layer in range(len(ddp.buckets)):
        gradients.point(Mark(layer, 0, 0))


def backward(ddp, gradients, value):
    """Add to all gradients in the order of a backward, with its points; those of the first layer come after none."""
    layers = len(ddp.buckets)
    for number in range(layers):
        for place in ddp.of_bucket(number):
            ddp.add(place, value + place)
        if number < layers - 1:
            gradients.point(Mark(~(layers - 1 - number), 0, 0))


def step(ddp, gradients, microbatches=3):
    """Run a training step; what it leaves are its reduced gradients."""
    gradients.begin_pass()
    ddp.zero()
    for microbatch in range(microbatches):
        begin_microbatch(ddp, microbatch == microbatches - 1)
        forward(ddp, gradients)
        backward(ddp, gradients, microbatch + 1.0)
    for finish in [ddp.reduce(number) for number in range(len(ddp.buckets))]:
        finish()


def begin_microbatch(ddp, is_last=False):
    for group in ddp.bucket_groups:
        group.is_last_microbatch = is_last


def states(gradients):
    return [bucket.state.name for bucket in gradients.buckets]


def with_memory(gradients):
    return [bucket for bucket in gradients.buckets if bucket.gpu is not None]


def layout_of(ddp):
    """Return classes, attributes, and the storage and place of each view, all of which closing restores."""
    views = [
        *(buffer.grad_data for buffer in ddp.buffers),
        *(bucket.grad_data for bucket in ddp.buckets),
        *(param.main_grad for param in ddp.params),
    ]
    return SimpleNamespace(
        classes=[type(each) for each in (*ddp.params, *views)],
        attributes=[sorted(vars(each)) for each in (*ddp.params, *ddp.buffers, *ddp.bucket_groups)],
        places=[
            (
                view.untyped_storage()._cdata,
                view.storage_offset(),
                view.shape,
                view.stride(),
                view.untyped_storage().size(),
            )
            for view in views
        ],
    ).__dict__
