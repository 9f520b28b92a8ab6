"""`Twins`: for tensors of a script, mostly in 16 bits, the values that they would have in float32."""

import functools
import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from ..casting import cast_tree
from ..dtypes import PLAIN_CLASSES
from ..torch_dispatch import clone
from .ops import Op, run_in_float32
from .tensors import is_whole, storage_of, tensors_in


class Twins:
    """Keeps the *twins* of tensors: their values in float32. Tensors that share a storage share a twin."""

    def __init__(self) -> None:
        # By the id of a storage: the storage, its values in float32, and the bytes of one of its elements.
        self._flat: dict[int, tuple[weakref.ref[Any], Tensor, int]] = {}

    def __bool__(self) -> bool:
        return bool(self._flat)

    def find(self, tensor: Tensor) -> Tensor | None:
        """Return the twin of a tensor, a view of the same shape and strides, or None."""
        if not self._flat or type(tensor) not in PLAIN_CLASSES or not storage_of(tensor):
            return None
        known = self._flat.get(id(tensor.untyped_storage()))
        if known is None or known[2] != tensor.element_size():
            return None
        flat: Tensor = known[1]
        # The twin of the whole storage, seen through the strides of the view.
        return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def put(self, tensor: Tensor, value: Tensor) -> None:
        """Store float32 values as the twin of a tensor of the same shape.

        Complex tensors, and tensors for which `storage_of` returns 0, get no twin.
        """
        if type(tensor) not in PLAIN_CLASSES or not storage_of(tensor) or tensor.is_complex():
            return
        known = self.find(tensor)
        if known is None:
            known = self._make(tensor)
        known.copy_(value)

    def drop(self, tensor: Tensor) -> None:
        """Forget the twin of a tensor that was overwritten. Do nothing if the tensor is only a part of its storage."""
        if self.find(tensor) is not None and is_whole(tensor):
            del self._flat[id(tensor.untyped_storage())]

    def compute(self, op: Op) -> list[Tensor]:
        """Run an op in float32 on the twins of its inputs. Return its floating results; [] if it cannot run so."""
        run = self.run(op)
        return [] if run is None else run.floating_results()

    def run(self, op: Op) -> Op | None:
        """Run an op in float32 on the twins of its inputs. Return this run; None if it cannot run so."""

        def take(tensor: Tensor) -> Tensor:
            twin = self.find(tensor)
            if twin is None:
                return tensor
            return clone(twin) if tensor.is_floating_point() else twin.to(tensor.dtype)

        args = [
            cast_tree(given, take) if self.has_any([given]) else earlier
            for given, earlier in zip(op.args, op.before, strict=True)
        ]
        kwargs = {name: cast_tree(value, take) for name, value in op.kwargs.items()}
        return run_in_float32(op._replace(before=args, kwargs=kwargs))

    def has_any(self, values: Iterable[Any]) -> bool:
        """Return whether a tensor among values, or in containers of them, has a twin."""
        return any(self.find(tensor) is not None for tensor in tensors_in(values))

    def _make(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        key, size = id(storage), tensor.element_size()
        everything = tensor.detach().as_strided((storage.nbytes() // size,), (1,), 0)
        flat: Tensor = clone(everything.float())
        # A twin must go when its storage is freed, because another storage may get the same id. `forget` runs no Python
        # code: a Ctrl-C in a weakref callback that is written in Python would be lost.
        forget = functools.partial(self._flat.pop, key)
        self._flat[key] = weakref.ref(storage, forget), flat, size
        return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
