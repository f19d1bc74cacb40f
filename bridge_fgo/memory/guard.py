"""Tensors whose memory is away, or on its way: whatever touches one brings the memory back, or is told what to call.

Two layers. Python: for as long as its memory is away a tensor is of a subclass of its class, whose `__torch_function__`
sees every operation on it that is called from Python, also in lists; and so are views of it that other code has made
(`Views`). C++: if PyTorch can take it back (2.12 and later), its storage refuses its address, so that a kernel of an
extension or a collective is a RuntimeError. Before 2.12 those read an address of 0.

Metadata (shape, dtype, device, gradient, hash, attributes) needs no memory and is given as ever. This package's own
moves run in `own()`.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import pickle
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import torch

from bridge_fgo.config import readable
from bridge_fgo.memory.undo import undo_on_error

own = torch._C.DisableTorchFunctionSubclass  # context of code that knows where memory is: nothing in it is a touch

GUARD = "_bridge_fgo_guard"  # attribute of a tensor whose memory is away: what its `Guard` calls, weakly

_T = torch.Tensor
_PROPERTIES = (
    "shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", "names", "requires_grad", "is_leaf", "grad",
    "grad_fn", "output_nr", "retains_grad", "_base", "_version", "_backward_hooks", "is_cuda", "is_cpu", "is_meta",
    "is_quantized", "is_sparse", "is_nested",
)  # fmt: skip
_METHODS = (
    "size", "numel", "nelement", "dim", "ndimension", "stride", "storage_offset", "element_size", "is_contiguous",
    "is_floating_point", "is_complex", "is_signed", "is_inference", "is_same_size", "get_device", "__len__", "__hash__",
    "requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "untyped_storage", "_typed_storage",
    "storage", "new_empty", "new_zeros", "new_ones", "new_full",
)  # fmt: skip
_LIKE = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like")
METADATA = frozenset(
    [getattr(_T, name).__get__ for name in _PROPERTIES if hasattr(_T, name)]
    + [getattr(_T, name) for name in _METHODS]
    + [getattr(torch, name) for name in (*_LIKE, "numel", "is_floating_point", "is_complex", "result_type")]
    + [_T.grad.__set__, _T.requires_grad.__set__, _T._backward_hooks.__set__]  # type: ignore[attr-defined]
)
"""Functions, as `__torch_function__` gets them, that neither read nor write a tensor's memory."""


class Guard:
    """Guards the tensors of one allocation while its memory is away.

    `touched` is called with a tensor that is about to be read or written. It brings the memory back and has `take_off`
    called, or raises RuntimeError. It is a method, held weakly: the guard is its object's.
    """

    def __init__(self, touched: Callable[[torch.Tensor], None]) -> None:
        self._touched = weakref.WeakMethod(touched)
        self._tensors: list[torch.Tensor] = []

    def put_on(self, tensors: Iterable[torch.Tensor]) -> None:
        """Guard these tensors from now on."""
        for tensor in tensors:
            if GUARD not in vars(tensor):
                vars(tensor)[GUARD] = self._touched
                tensor.__class__ = _guarded(type(tensor))
                self._tensors.append(tensor)

    def touch_if_others(self, tensor: torch.Tensor) -> None:
        """Touch a tensor if another guard guards it."""
        if is_guarded(tensor) and vars(tensor).get(GUARD) is not self._touched:
            _touch(tensor)

    def take_off(self) -> None:
        """Guard nothing any more."""
        for tensor in self._tensors:
            tensor.__class__ = getattr(type(tensor), "guarded_class", type(tensor))
            vars(tensor).pop(GUARD, None)
        self._tensors.clear()


def class_of(tensor: torch.Tensor) -> type[torch.Tensor]:
    """Return the class that a tensor has of itself, whatever guards it or watches its gradient (`watched_class`)."""
    cls = type(tensor)
    return getattr(cls, "watched_class", getattr(cls, "guarded_class", cls))


def set_class(tensor: torch.Tensor, cls: type[torch.Tensor]) -> None:
    """Have a tensor be of a class, guarded as before."""
    tensor.__class__ = _guarded(cls) if is_guarded(tensor) else cls


def is_guarded(tensor: torch.Tensor) -> bool:
    """Return whether the memory of a tensor is away, or on its way."""
    return hasattr(type(tensor), "guarded_class")


@cache
def _guarded(cls: type[torch.Tensor]) -> type[torch.Tensor]:
    def torch_function(_: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in METADATA:
            touch_all((args, kwargs))
            if not any(map(is_guarded, tensors_in((args, kwargs)))):
                return func(*args, **kwargs)
        with own():
            return func(*args, **kwargs)

    def reduce_ex(self: torch.Tensor, protocol: Any) -> Any:
        _touch(self)  # first: pickle takes the attributes of a tensor, and `copy` its class, before its bytes
        return self.__reduce_ex__(protocol)

    def deepcopy(self: torch.Tensor, memo: dict[int, Any]) -> Any:
        _touch(self)
        return copy.deepcopy(self, memo)

    members = {
        "__torch_function__": classmethod(torch_function),
        "__reduce_ex__": reduce_ex,
        "__deepcopy__": deepcopy,
        "guarded_class": cls,
    }
    return type(f"Offloaded{cls.__name__}", (cls,), members)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in lists, tuples and dictionaries."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(each)


touching = threading.RLock()
"""Held as a touch reloads memory: PyTorch lets other threads run meanwhile, which may touch the same memory."""


def _touch(tensor: torch.Tensor) -> None:
    with touching:
        if GUARD not in vars(tensor):
            return  # another thread, or an earlier tensor of the same call, has brought it back
        touched = vars(tensor)[GUARD]()
        if touched is None:
            raise RuntimeError(f"a tensor of shape {tuple(tensor.shape)} was used, and what had its memory is gone")
        touched(tensor)


def _counts_all_holders() -> bool:
    base = torch.empty(0)
    before, _view, after = sys.getrefcount(base), base.view(0), sys.getrefcount(base)  # the view holds it in C++
    return after > before


_COUNTS_ALL = _counts_all_holders()
"""Whether Python counts a tensor's holders in C++ too, as newer versions of PyTorch have it."""
_HELD_ONCE = 2  # what `sys.getrefcount(ref())` returns of an object that one dictionary has


def held(refs: Iterable[weakref.ref[torch.Tensor]]) -> list[torch.Tensor]:
    """Return those of some tensors that have two holders or more; all if PyTorch does not have Python count them.

    In a step of 24 layers and 4 microbatches this and `Views` took the host 0.6 ms more; guards of all 292 gradients
    took 3 ms.
    """
    some = [ref for ref in refs if sys.getrefcount(ref()) > _HELD_ONCE] if _COUNTS_ALL else refs
    return _alive(some)


def give_up(tensors: Iterable[torch.Tensor], storage: torch.UntypedStorage, why: str) -> None:
    """Make each use of guarded tensors of an emptied storage a RuntimeError for good: nobody can fill it again."""

    def touched(tensor: torch.Tensor) -> None:
        raise RuntimeError(why)

    for tensor in tensors:
        vars(tensor)[GUARD] = lambda: touched
    fill(storage, 0, why)  # one that refuses its address cannot be told another reason
    empty(storage, why)


def touch_all(value: Any) -> None:
    """Touch what is guarded of a tensor, or of lists, tuples and dictionaries of them, for a reader in C++."""
    for tensor in filter(is_guarded, tensors_in(value)):
        _touch(tensor)


_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_OURS = (_PACKAGE + os.sep, os.path.dirname(torch.__file__) + os.sep)
_PYTHONS = (copy.__file__, pickle.__file__, contextlib.__file__)


def toucher() -> str:
    """Return the file and line that this thread is in, outside of this package, of PyTorch, and of copy and pickle."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_OURS) and file not in _PYTHONS:
            break
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


class Touches:
    """Counts the bytes that came back because code used offloaded states, and says where that code is."""

    def __init__(self) -> None:
        self.nbytes = 0  # that came back, in the whole run
        # each returns why nothing may come back now, and what to call; empty if it may
        self.refusals: list[Callable[[], str]] = []
        # called before offloaded states are reloaded, for any reader, or are loaded on the host
        self.before_writes: list[Callable[[], object]] = []
        self._new: dict[str, int] = {}
        self._said: set[str] = set()
        self._looks_before = _looks

    def refusal(self) -> str:
        """Return why nothing may come back now; empty if it may."""
        return next((why for refusal in self.refusals if (why := refusal())), "")

    def may_write(self) -> None:
        """Tell that somebody may write the states from now on."""
        for call in self.before_writes:
            call()

    def count(self, nbytes: int) -> None:
        """Count what a touch on this thread has brought back."""
        self.nbytes += nbytes
        place = toucher()
        if place not in self._said:
            self._new[place] = self._new.get(place, 0) + nbytes

    def news(self) -> str:
        """Return a line on the places that have touched states since the last call, each once in a run, or nothing.

        Code that makes new views again and again gets one too.
        """
        looks = _looks - self._looks_before
        if looks >= MANY_LOOKS and "views" not in self._said:
            self._said.add("views")
            return (
                f"{looks} times code had made new views of states, or of gradients, and kept them as they were "
                "offloaded: each time all objects of the process are looked at (0.15 s for 800,000); make and keep "
                "such views once"
            )
        if not self._new:
            return ""
        places = ", ".join(f"{place} ({readable(nbytes)})" for place, nbytes in self._new.items())
        self._said.update(self._new)
        self._new.clear()
        return (
            f"optimizer state was used while it was offloaded, and came back to the GPU for it: {places}. It is right; "
            "bridge_fgo.reload_states() before brings all of it in one go"
        )


# Views that user code has made.

MANY_LOOKS = 10  # for new views, after which a line says so
_looks = 0
_views: weakref.WeakSet[Views] = weakref.WeakSet()


class Views:
    """The tensors on a storage that are not its owner's: views that other code has made and holds.

    PyTorch does not list them, but counts the users of the storage. If it has others than it had, one look at all
    objects of the process finds them, and those of all other `Views`: 0.15 s for 800,000 objects. Frozen ones
    (`gc.freeze`) are not found, nor what C++ holds alone: `hides_some` says so.

    `own` is a tensor on the storage, which the owner alone uses if `is_owners`; `users` is how many users are not
    others'. Several `Views` may have one storage: states that others have put into one tensor.
    """

    def __init__(self, own: torch.Tensor, users: int | None = None, is_owners: bool = True) -> None:
        self._own, self._storage = own, own.untyped_storage()
        self._is_owners = is_owners
        self._more = _users(self._storage) if users is None else users  # users beside those that are listed
        self._list((), ())
        _views.add(self)

    def _list(self, of_owner: Iterable[torch.Tensor], of_others: Iterable[torch.Tensor]) -> None:
        self._of_owner: list[weakref.ref[torch.Tensor]] = []
        self._of_others: list[weakref.ref[torch.Tensor]] = []
        self._gone: list[weakref.ref[torch.Tensor]] = []  # those of them whose tensor is gone
        self.add(of_owner, of_others)

    def add(self, tensors: Iterable[torch.Tensor], others: Iterable[torch.Tensor] = ()) -> None:
        """Note tensors that the owner has put on the storage: its own, and others'."""
        self._of_owner += [weakref.ref(tensor, self._gone.append) for tensor in tensors]
        self._of_others += [weakref.ref(tensor, self._gone.append) for tensor in others]

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """Have the owner keep some of those that were added; the others that are on the storage are others'."""
        kept = {id(tensor) for tensor in tensors}
        owners = _alive(self._of_owner)
        left = [each for each in owners if id(each) not in kept and each.untyped_storage()._cdata == self.place]
        others = {id(each): each for each in (*self.found, *left)}  # others may have held one before the owner did
        self._list([each for each in owners if id(each) in kept], others.values())

    @property
    def place(self) -> int:
        """Which storage it is."""
        return self._storage._cdata

    def are_known(self) -> bool:
        """Return whether nobody else has made a tensor on the storage since `find`."""
        listed = len(self._of_owner) + len(self._of_others) - len(self._gone)
        return _users(self._storage) == self._more + listed

    @property
    def found(self) -> list[torch.Tensor]:
        """Those that `find` has found."""
        return _alive(self._of_others)

    def that_span(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return those of `found` that are of a tensor and of other memory, or of one that is not contiguous.

        Only those that code in Python holds: a tensor that was divided into states lives on in C++ alone, as the base
        of these views. Before Python counted the holders in C++, these could not be told apart: then it returns none.
        """
        refs = [r for r in self._of_others if sys.getrefcount(r()) > _HELD_ONCE or r()._use_count() == 1]  # pyright: ignore[reportOptionalMemberAccess]
        several = [each for each in _alive(refs if _COUNTS_ALL else ()) if each is getattr(each, "_local_tensor", each)]
        whole = tensor.is_contiguous()
        return [each for each in several if _overlap(each, tensor) and not (whole and lies_in(each, tensor))]

    def find(self) -> list[torch.Tensor]:
        """Return them all."""
        if not self.are_known():
            global _looks
            _looks += 1
            look_for(_views)
        return self.found

    def hides_some(self, known: Iterable[torch.Tensor]) -> bool:
        """Return whether somebody uses the storage whom `find` does not find, and who is none of these tensors."""
        if _users(self._storage) == 2:  # `own`, and the object that is the storage in Python
            return False
        tensors = [*self.find(), *_alive(self._of_owner), *(each._own for each in _views), *known]
        with own():
            local = {
                id(it): it for each in tensors if torch._C._has_storage(it := getattr(each, "_local_tensor", each))
            }
            there = [it for it in local.values() if it.untyped_storage()._cdata == self.place]
        return _users(self._storage) > len(there) + 1


def _alive(refs: Iterable[weakref.ref[torch.Tensor]]) -> list[torch.Tensor]:
    return [tensor for ref in refs if (tensor := ref()) is not None]


def look_for(views: Iterable[Views]) -> None:
    """Find the tensors on some storages, if any are not known."""
    stale: dict[int, list[Views]] = {}
    for each in views:
        if not each.are_known():
            stale.setdefault(each.place, []).append(each)
    found: dict[int, list[torch.Tensor]] = {place: [] for place in stale}
    owners = {id(each._own) for each in _views if each._is_owners}
    with own():
        for each in gc.get_objects() if stale else ():
            if issubclass(type(each), torch.Tensor):
                local = getattr(each, "_local_tensor", each)  # of a DTensor
                place = local.untyped_storage()._cdata if torch._C._has_storage(local) else None
                if place in found and id(each) not in owners:
                    found[place].append(each)
    for place, several in stale.items():
        for of in several:
            mine = _alive(of._of_owner)
            ids = {id(tensor) for tensor in (*mine, of._own)}
            others = [view for view in found[place] if id(view) not in ids]
            of._list(mine, others)
            of._more = _users(of._storage) - len(mine) - len(others)


def first_byte(tensor: torch.Tensor) -> int:
    """Return the place of a tensor's first byte in its storage."""
    return int(tensor.storage_offset()) * tensor.itemsize


def _end_byte(tensor: torch.Tensor) -> int:
    """Return the place after a tensor's last byte in its storage."""
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return first_byte(tensor) + span * tensor.itemsize


def lies_in(view: torch.Tensor, whole: torch.Tensor) -> bool:
    """Return whether the memory of a tensor is a part of a contiguous one's on the same storage."""
    return first_byte(whole) <= first_byte(view) and _end_byte(view) <= _end_byte(whole)


def _overlap(view: torch.Tensor, other: torch.Tensor) -> bool:
    return first_byte(other) < _end_byte(view) and first_byte(view) < _end_byte(other)


def rebind(view: torch.Tensor, storage: torch.UntypedStorage, place: int) -> None:
    """Have a tensor be of another storage, from a byte of that on."""
    there = torch.empty(0, dtype=view.dtype, device=view.device)
    view.data = there.set_(storage, place // view.itemsize, view.shape, view.stride())  # pyright: ignore[reportArgumentType, reportCallIssue]


def _users(storage: torch.UntypedStorage) -> int:
    return torch._C._storage_Use_Count(storage._cdata)


# Storages.

_CAN_REFUSE = hasattr(torch._C, "_clear_storage_data_ptr_access_error_msg")


def empty(storage: torch.UntypedStorage, why: str) -> None:
    """Give the memory of a storage back; C++ code that asks for its address gets a RuntimeError with `why`."""
    storage.resize_(0)
    if _CAN_REFUSE:
        torch._C._set_storage_data_ptr_access_error_msg(storage._cdata, why)


def fill(storage: torch.UntypedStorage, nbytes: int, why: str) -> None:
    """Take memory of undefined content for a storage that `empty` has emptied, on the current stream.

    If there is none, it stays empty and refuses its address as before.
    """
    if not _CAN_REFUSE:
        storage.resize_(nbytes)
        return
    torch._C._clear_storage_data_ptr_access_error_msg(storage._cdata)
    with undo_on_error(lambda: torch._C._set_storage_data_ptr_access_error_msg(storage._cdata, why)):
        storage.resize_(nbytes)
