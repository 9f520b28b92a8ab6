"""`AskedDtypes`: remembers which float32 tensors of a run in float32 the script has asked for in 16 bits."""

import contextlib

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class AskedDtypes:
    """The dtypes that the script asked for, by the storages of tensors that are float32 instead."""

    def __init__(self) -> None:
        self._asked: dict[int, tuple[StorageWeakRef, torch.dtype]] = {}
        self._limit = 1024  # the number of entries above which entries of freed storages are dropped

    def __bool__(self) -> bool:
        return bool(self._asked)

    def add(self, tensor: Tensor, dtype: torch.dtype) -> None:
        """Note the dtype that the script asked for in a tensor. It also holds for tensors that share its storage, such
        as views and `nn.Parameter(tensor)`.
        """
        with contextlib.suppress(RuntimeError):  # also NotImplementedError: the tensor has no storage, as in torch.func
            reference = StorageWeakRef(tensor.untyped_storage())
            self._asked[reference.cdata] = reference, dtype
        if len(self._asked) > self._limit:
            self._asked = {key: value for key, value in self._asked.items() if not value[0].expired()}
            self._limit = max(1024, 2 * len(self._asked))

    def find(self, tensor: Tensor) -> torch.dtype:
        """Return the dtype that the script asked for, or else the dtype of the tensor."""
        if tensor.dtype is not torch.float32 or not self._asked:
            return tensor.dtype
        with contextlib.suppress(RuntimeError):
            reference, dtype = self._asked.get(StorageWeakRef(tensor.untyped_storage()).cdata, (None, tensor.dtype))
            # if the storage was freed, its address may belong to another storage now
            if reference is not None and not reference.expired():
                return dtype
        return tensor.dtype
