"""The gradients of one DDP bucket: without memory while they are zeros, and on the host between microbatches."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from enum import Enum, auto
from functools import cache
from typing import Any

import torch

from bridge_fgo.memory.guard import Guard, Views, class_of, empty, fill, first_byte, held, rebind, set_class, touching
from bridge_fgo.memory.host_buffer import HostBuffer
from bridge_fgo.memory.meters import Traffic
from bridge_fgo.memory.transfers import Transfers

BUCKET = "_bridge_fgo_bucket"  # attribute of a parameter that holds the bucket of its gradient

_WHY = (
    "gradients of a DDP bucket, which were off the GPU, were used in a way that does not bring them back (by a kernel "
    "of an extension, a collective, or a view that C++ code or gc.freeze() hides): read `param.main_grad` or "
    "`bucket.grad_data` at each use, or set OffloadConfig.gradients=False"
)


class BucketState(Enum):
    """Whether the gradients of a bucket have GPU memory, and in which direction they are copied."""

    ABSENT = auto()  # nowhere: all are zero
    HERE = auto()
    OFFLOADING = auto()  # on the GPU, and being copied to the host
    OFFLOADED = auto()
    RELOADING = auto()


class GradientBucket:
    """A bucket's gradients in a storage of their own, which is emptied and filled in place; a `Movable`.

    `data` is mcore's `bucket.grad_data`, [elements of the bucket]; `views` are the gradients in it, and what others
    have made of them. They stay the objects that they are, and lose what they held: the gradients are ABSENT.

    Code that reads `main_grad` of one of `params` finds it allocated, zeroed or reloaded: it is a property of a
    subclass of `torch.nn.Parameter`, or of a quantized weight's own class (`_add_property`). So no reader has to be
    known, also if a kernel of an extension writes the gradient. And Python code that uses `data`, a gradient that was
    read before and is held, or a view of one, finds it too (`Guard`, `Views`).

    `needed` is a method, held weakly, that is called once a bucket that was not HERE is. `traffic` counts copies.
    """

    def __init__(
        self,
        data: torch.Tensor,
        views: Sequence[torch.Tensor],
        params: Sequence[torch.nn.Parameter],
        transfers: Transfers,
        needed: Callable[[GradientBucket], None],
        traffic: Traffic,
    ) -> None:
        self.nbytes = data.nbytes
        self.state = BucketState.ABSENT
        self.moves = False  # whether it leaves between microbatches, so that reads are counted
        self.read: set[int] = set()  # parameters, by `id`, whose gradient was read since the bucket came
        self._streams: set[int] = set()  # those on which it was
        self.asleep = ""  # the call that ends a sleep of the gradients, which errors name; empty while awake
        self._transfers, self._needed, self._traffic = transfers, weakref.WeakMethod(needed), traffic
        self._views = [weakref.ref(view) for view in (data, *views)]
        self._first = first_byte(data)  # byte of the storage that they are in
        self._properties = [weakref.ref(vars(param)["main_grad"]) for param in params]
        of_properties = {id(ref()) for ref in self._properties}
        self._attributes = [ref for ref in self._views if id(ref()) not in of_properties]
        self._guard = Guard(self._touched)
        self._host: HostBuffer | None = None
        self._bytes = torch.empty(self.nbytes, dtype=torch.uint8, device=data.device)
        self._storage = self._bytes.untyped_storage()
        self._others = Views(self._bytes)
        self._shards: Sequence[torch.Tensor] | None = None
        self._bind(self._bytes.view(data.dtype))
        self._others.add((data, *views))
        self._guard_held()
        self.free()
        self._classes = [(weakref.ref(p), class_of(p), _add_property(class_of(p), self)) for p in params]
        for param in params:
            vars(param)[BUCKET] = self
        self._watch(True)

    def __reduce__(self) -> Any:
        """Have a parameter that is copied or pickled know of no bucket."""
        return type(None), ()

    def _bind(self, data: torch.Tensor) -> None:
        """Have all views be of other memory, of `data`'s elements."""
        before, self._first = self._first, first_byte(data)
        for view in [*(view for ref in self._views if (view := ref()) is not None), *self._others.found]:
            rebind(view, data.untyped_storage(), first_byte(data) + first_byte(view) - before)

    @property
    def is_complete(self) -> bool:
        """Whether the gradient of each parameter was read since the bucket came, and so added to."""
        return len(self.read) == len(self._classes)

    def _watch(self, watches: bool) -> None:
        """Have each read of a gradient go through the property, which takes the host 0.3 us, or not.

        Those of quantized weights always do.
        """
        for ref, plain, watched in self._classes:
            if (param := ref()) is not None:
                set_class(param, watched if watches else plain)

    # The `Movable` protocol: memory to copy from and to.

    @property
    def host(self) -> HostBuffer:
        """The host buffer, as large as the bucket."""
        assert self._host is not None
        return self._host

    @property
    def has_host(self) -> bool:
        """Whether its host memory is mapped."""
        return self._host is not None

    @property
    def pinned_bytes(self) -> int:
        """Pinned host memory."""
        return 0 if self._host is None else self._host.pinned_bytes

    def map_host(self) -> list[HostBuffer]:
        """Map the host memory, once; return it while it is to be page-locked, or nothing."""
        self._host = self._host or HostBuffer(self.nbytes)
        return [self._host] if self._host.is_to_lock else []

    def close_host(self) -> None:
        """Let go of the host memory, if there is any."""
        if self._host is not None:
            self._transfers.forget(self._host.address)
            self._host.close()
            self._host = None

    @property
    def gpu(self) -> torch.Tensor | None:
        """The memory, uint8 [nbytes]; None if it is freed."""
        return self._bytes if self._storage.nbytes() else None

    @property
    def moving(self) -> torch.Tensor:
        """The memory, uint8 [nbytes]."""
        return self._bytes

    def allocate(self) -> None:
        """Take GPU memory, of undefined content, on the current stream."""
        fill(self._storage, self.nbytes, _WHY)

    def free(self) -> None:
        """Give the GPU memory back."""
        empty(self._storage, _WHY)

    def _guard_held(self) -> None:
        """Guard the gradients that somebody holds: most are held by their parameter alone, and read through that."""
        attributes = [view for ref in self._attributes if (view := ref()) is not None]
        self._guard.put_on([*attributes, *held(self._properties), *self._others.found])

    def know_shards(self, shards: Sequence[torch.Tensor] | None) -> None:
        """Take note of the shards that mcore makes of the bucket once, so that nobody looks for who has made them."""
        if shards is not None and shards is not self._shards:
            self._shards = shards
            self._others.add(shards)

    def guard_views(self) -> None:
        """Guard the views of gradients that are not HERE which other code has made since the newest look."""
        if self.state is not BucketState.HERE:
            self._guard.put_on(self._others.find())

    def _touched(self, tensor: torch.Tensor) -> None:
        self.require()
        self._guard.take_off()  # also if something came between a move and its note
        # Race: as in `note`; and what is written here would be copied, or freed, before.
        self._transfers.join(self._streams)

    # Verbs, in the order of a step: require, offload, release, reload, zero.

    def require(self) -> None:
        """Have the gradients on the GPU, for the current stream to read and write; RuntimeError while they are asleep.

        torch.OutOfMemoryError if there is no memory for them; they stay where they are.
        """
        if self.state is not BucketState.HERE:
            with touching:
                self._require()

    def _require(self) -> None:
        if self.state is BucketState.HERE:  # another thread was first
            return
        if self.asleep:
            raise RuntimeError(f"gradients of a DDP bucket were used, and are off the GPU: call {self.asleep} first")
        if self.state is BucketState.ABSENT:
            # Race: memory that is taken on a side stream of the model is that stream's, and would be reused before
            # others have read it.
            with self._transfers.computing():
                self.allocate()
                self._bytes.zero_()
        if self.state is BucketState.OFFLOADED:
            self.reload()
        self._arrive()
        if (needed := self._needed()) is not None:
            needed(self)

    def _arrive(self) -> None:
        if self.state is BucketState.RELOADING:
            self._transfers.wait_in(self)
        self._guard.take_off()
        self.state = BucketState.HERE
        self.read.clear()
        self._streams.clear()

    def note(self, param: torch.nn.Parameter) -> None:
        """Note that the gradient of a parameter is read on the current stream, to be added to.

        If the bucket does not move, the first read is enough.
        """
        self.read.add(id(param))
        # Race: a side stream of the model, which had waited for others before one of these brought the bucket, would
        # add to gradients that are yet to be zeroed, or copied in.
        self._transfers.join(self._streams)
        if not self.moves:
            set_class(param, class_of(param))

    def wait_for_adders(self) -> None:
        """Have the training stream wait for those on which gradients were read, to be added to."""
        # Race: Bridge builds DDP on a stream of its own, on which autograd then adds to the gradients that no matrix
        # product accumulates; the training stream waits for it as a backward ends, if no error ends that. A copy would
        # miss what is added, and it would be added to freed memory.
        self._transfers.wait_for(self._streams)

    def offload(self) -> None:
        """Start to copy the gradients to the host; a read of one until `release` keeps them here."""
        if self.state is BucketState.RELOADING:
            self._arrive()
        assert self.state is BucketState.HERE
        if not self.moves:
            self._watch(True)
        with self._traffic:
            self.wait_for_adders()
            self._transfers.copy_out(self)
        self._guard_held()  # what is written from now on would not be copied
        self._traffic.out += self.nbytes
        self.state = BucketState.OFFLOADING
        self.guard_views()

    def release(self) -> None:
        """Free the memory of a bucket that is OFFLOADING, once it is copied; the training stream waits for that."""
        assert self.state is BucketState.OFFLOADING
        self._transfers.wait_out(self)
        self.state = BucketState.OFFLOADED  # first: an interruption must not leave a bucket without memory OFFLOADING
        self._transfers.release(self)

    def reload(self) -> None:
        """Start to copy an OFFLOADED bucket back; raise as `require`."""
        assert self.state is BucketState.OFFLOADED
        with self._traffic:
            self._transfers.copy_in(self)
        self._traffic.back += self.nbytes
        self.state = BucketState.RELOADING

    def zero(self) -> None:
        """Make all gradients zero, and let go of their memory."""
        if self.state is BucketState.HERE:
            self._watch(True)
            self._guard_held()
        if self.gpu is not None:  # whatever the state: an error may have come between the two
            self.wait_for_adders()
            if self._host is not None:
                # Race: if a pass ended with an error, or an offload was given up, a copy may still use the memory.
                self._transfers.wait_out(self)
                if self.state in (BucketState.OFFLOADED, BucketState.RELOADING):
                    self._transfers.wait_in(self)
            self.free()
        self.state = BucketState.ABSENT

    def close(self, data: torch.Tensor) -> None:
        """Have the gradients be those of `data` from now on, as before there was this bucket; free its memory."""
        self._others.find()
        self.zero()
        self._guard.take_off()
        fill(self._storage, 0, _WHY)  # while it refuses its address, `_bind` cannot take views off it
        self._bind(data)
        empty(self._storage, _WHY)
        self._watch(False)
        for param in (param for ref, *_ in self._classes if (param := ref()) is not None):
            vars(param).pop(BUCKET, None)
        _remove_property(self)
        self.close_host()


_changed: dict[type[torch.Tensor], weakref.WeakSet[GradientBucket]] = {}
"""Classes that have the property themselves, each with the buckets of its parameters."""


def _add_property(cls: type[torch.Tensor], bucket: GradientBucket) -> type[torch.Tensor]:
    """Return the class of a bucket's parameters whose `main_grad` has memory as soon as it is read.

    For `torch.nn.Parameter` it is a subclass. A quantized class gets the property itself, until the last bucket is
    closed: Transformer Engine, in C++ too, knows its tensors by their exact class.
    """
    if cls is torch.nn.Parameter:
        return _subclass()
    if cls not in _changed:
        for name, member in _members(cls).items():
            assert name not in vars(cls)
            setattr(cls, name, member)
    _changed.setdefault(cls, weakref.WeakSet()).add(bucket)
    return cls


def _remove_property(bucket: GradientBucket) -> None:
    """Take the property off the classes that no other bucket needs."""
    for cls, buckets in list(_changed.items()):
        buckets.discard(bucket)
        if not buckets:
            del _changed[cls]
            for name in _members(cls):
                delattr(cls, name)


@cache
def _subclass() -> type[torch.nn.Parameter]:
    cls = torch.nn.Parameter

    def reduce_ex(self: Any, protocol: Any) -> Any:
        _bring(self)
        return cls.__reduce_ex__(self, protocol)

    members = {**_members(cls), "__reduce_ex__": reduce_ex, "__module__": cls.__module__, "watched_class": cls}
    return type(cls.__name__, (cls,), members)


def _bring(param: torch.Tensor) -> None:
    """Have the gradient of a parameter on the GPU, which is among the attributes that are pickled or copied."""
    if (bucket := vars(param).get(BUCKET)) is not None:
        bucket.require()


def _members(cls: type[torch.Tensor]) -> dict[str, Any]:
    """Return the members by which `main_grad` of a class's parameters has memory as soon as it is read."""

    def get(self: Any) -> torch.Tensor:
        own = self.__dict__
        bucket = own.get(BUCKET)
        if bucket is not None:
            if bucket.state is not BucketState.HERE:
                bucket.require()
            bucket.note(self)
        try:
            return own["main_grad"]
        except KeyError:  # of a copy, or of a quantized tensor that is no parameter
            raise AttributeError(f"{cls.__name__!r} object has no attribute 'main_grad'") from None

    def put(self: Any, tensor: torch.Tensor | None) -> None:
        own = self.__dict__
        if own.get(BUCKET) is not None and tensor is not own.get("main_grad"):
            raise RuntimeError(
                "`main_grad` of a parameter was replaced, whose gradient DDP keeps in a bucket: set "
                "OffloadConfig.gradients=False"
            )
        own["main_grad"] = tensor

    def delete(self: Any) -> None:
        get(self)
        put(self, None)
        del self.__dict__["main_grad"]

    deepcopy_before: Any = cls.__deepcopy__

    def deepcopy(self: Any, memo: dict[int, Any]) -> Any:
        if cls is not torch.nn.Parameter:  # whose copies have no attributes
            _bring(self)
        copied: Any = deepcopy_before(self, memo)
        copied.__class__ = cls
        return copied

    return {"main_grad": property(get, put, delete), "__deepcopy__": deepcopy}
