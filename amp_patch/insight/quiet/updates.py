"""`UpdateWatch`: measures how much of the changes of 16-bit tensors is lost in rounding.

Some tensors outlive a step: weights, states of optimizers, averages, statistics, counters. If such a tensor has 16
bits, it is *followed*: the ops that change it run a second time, in float32, on a float32 copy of it (its *twin*). When
a step of an optimizer begins or ends, the change of the tensor is compared with the change of its twin, which is the
true change.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...dtypes import LOW_DTYPES
from ...session import current
from ...torch_dispatch import COPY, clone, get_current_node, is_random
from ..ops import Op, Overload
from ..quiet_record import GRADIENTS, WEIGHTS
from ..sites import Site, find_site
from ..tensors import storage_of, tensors_in
from ..twins import Twins
from .tally import Change, Source, Tally, compare_change

BUDGET = 2**25
"""The most elements that are followed in one step. Tensors that are left out have their turn in later steps. A tensor
with more elements than this is never followed.
"""

_FOLLOWED = frozenset(
    {"_to_copy", "clone", "index", "index_select", "gather", "take", "index_put", "index_add", "scatter", "lerp"}
    | {"scatter_add", "masked_fill", "where", "index_copy", "cumsum"}
)
"""Ops whose results are followed outside of backward passes, in addition to pointwise ops."""


_SUMS = frozenset({"index_add_", "scatter_add_", "index_put_", "put_", "scatter_reduce_", "_index_put_impl_"})
"""Ops that may add many values to one element. In 16 bits, a single call may lose some of these values."""


class _Followed(NamedTuple):
    """A tensor whose change is followed in this step.

    Attributes:
        tensor: a one-dimensional view of the whole storage.
        before: a copy of `tensor` from before its first change.
        shown: the tensor that the script changed, which may be a part of the storage. Reports use its name.
        source: the code that made the first change.
    """

    tensor: Tensor
    before: Tensor
    shown: Tensor
    source: Source


class _Successor(NamedTuple):
    """A result that may take the place of an older tensor, as in `total = total + loss`.

    Attributes:
        storage: the storage of the result, held weakly.
        change: how the result differs from the older tensor.
        source: the code that made the result.
    """

    storage: Any
    change: Change
    source: Source


class UpdateWatch:
    """Follows the changes of 16-bit tensors. It reads values on the host when a step begins and ends, and changes no
    value of the script.

    Args:
        name: returns the qualified name of a tensor of a model, "" for another tensor, and None for a tensor whose
            changes are not to be followed, such as the 16-bit copy of a float32 master weight.
        find_module: returns the name of the module that is running.
    """

    def __init__(self, name: Callable[[Tensor], str | None], find_module: Callable[[], str] = lambda: "") -> None:
        self._name = name
        self._find_module = find_module
        self._twins = Twins()
        self._followed: dict[int, _Followed] = {}  # by the id of the storage
        self._roots: dict[int, Tensor] = {}  # by the id of the storage of a result: the older tensor it comes from
        self._made: dict[int, tuple[Any, Source]] = {}  # by that id, too: the storage, held weakly, and its source
        self._successors: list[_Successor] = []
        self._young: set[int] = set()  # addresses of the storages of floating tensors made in this step
        self._left = BUDGET  # elements that may still be followed in this step
        # Ids of the storages that have had their turn. They wait until a step has left out no other tensor.
        self._done: set[int] = set()
        self._is_full = False  # whether this step has left out a tensor that has not had its turn
        self._optimizer: Optimizer | None = None  # the optimizer whose step runs
        self._weights: set[int] = set()  # addresses of the storages of the weights of `_optimizer`
        self.tally = Tally()
        self.step = 0

    def records(self) -> list[Any]:
        """Return the records of the lost changes so far."""
        return self.tally.records()

    # ---- steps -------------------------------------------------------------------------------------------------------

    def begin_step(self, optimizer: Optimizer, *, has_stepped: bool = False) -> None:
        """Judge the changes from before the step, such as summed gradients. Changes from now on are the optimizer's.

        Args:
            has_stepped: whether the step is over already, because a step with a closure reports only its end. Then all
                changes count as the optimizer's.
        """
        if not has_stepped:
            self._judge()
        self._optimizer = optimizer
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        self._weights = {storage_of(weight) for weight in weights if isinstance(weight, Tensor)}

    def end_step(self, optimizer: Optimizer | None = None) -> None:
        """Judge the changes since `begin_step`. They are made by `optimizer`, or else by the one of `begin_step`."""
        self._optimizer = optimizer or self._optimizer
        self._judge()
        self._optimizer = None
        self._young.clear()
        if not self._is_full:
            self._done.clear()
        self._is_full, self._left = False, BUDGET
        self.step += 1

    def _judge(self) -> None:
        """Compare all changes since the last call with the true ones, and stop following the changed tensors."""
        with torch.no_grad(), current.without_casts():
            self._judge_changes()
            self._keep_successors()
        self._followed.clear()
        self._roots.clear()
        self._made.clear()
        self._twins = Twins()

    def _judge_changes(self) -> None:
        if not self._followed:
            return
        names = self._name_of_optimizer()
        for key, followed in self._followed.items():
            exact = self._twins.find(followed.tensor)
            self._done.add(key)
            if exact is None:
                continue
            change = compare_change(followed.before, followed.tensor, exact)
            if change is None:
                continue
            source = followed.source
            role, name = names.get(key, ("", ""))
            if role:
                source = replace(source, role=role, optimizer=type(self._optimizer).__name__)
            name = name or self._name(followed.shown) or ""
            number = key
            # each step makes a tensor of its own, with another id: the module stands for all of them
            if source.is_temporary:
                number = hash(source.module)
            self.tally.add(self.step, source, change, name, number, followed.tensor)

    def _name_of_optimizer(self) -> dict[int, tuple[str, str]]:
        """Return the roles and names of weights and states of the optimizer that steps, by the id of the storage."""
        names: dict[int, tuple[str, str]] = {}
        if self._optimizer is None:
            return names
        for group in self._optimizer.param_groups:
            for weight in group["params"]:
                if not isinstance(weight, Tensor) or not storage_of(weight):
                    continue
                name = self._name(weight) or f"parameter of shape {tuple(weight.shape)}"
                names[id(weight.untyped_storage())] = (WEIGHTS, name)
                for key, value in self._optimizer.state.get(weight, {}).items():
                    if isinstance(value, Tensor) and storage_of(value):
                        names[id(value.untyped_storage())] = (str(key), f"{key} of {name}")
        return names

    def _keep_successors(self) -> None:
        """Compare each result that is still alive with the older tensor that it may replace."""
        for key, (reference, source) in self._made.items():
            storage = reference()
            if storage is None or key in self._followed:
                continue
            root = self._roots[key]
            stored = torch.empty(0, dtype=root.dtype, device=root.device).set_(storage, 0, root.shape, _strides(root))
            exact = self._twins.find(stored)
            change = None if exact is None else compare_change(root, stored, exact)
            if change is not None:
                self._successors.append(_Successor(reference, change, source))
        # forget results that the script has freed
        self._successors = [each for each in self._successors if each.storage() is not None]

    # ---- ops ---------------------------------------------------------------------------------------------------------

    def prepare(self, overload: Overload, args: Sequence[Any], kwargs: dict[str, Any]) -> Site | None:
        """Copy the tensors that an op is about to change. Return the op's line if it is to be followed, else None."""
        node = get_current_node()
        is_gradient = node is not None and "AccumulateGrad" in node.name()
        is_sum = overload.name in _SUMS
        if node is not None and not is_gradient:  # in a backward pass, only the sums of gradients are followed
            return None
        written = list(_written_by(overload, args, kwargs))
        if written:
            targets = [tensor for tensor in written if tensor.dtype in LOW_DTYPES]
            is_known = any(self._is_old(tensor) or self._twins.find(tensor) is not None for tensor in targets)
            if not targets or not (is_known or is_gradient or is_sum):
                return None
            if overload.packet is COPY and self._is_wide_and_old(args[1]):
                self._forget(args[0])
                return None
        elif not self._may_succeed(overload, args, kwargs):
            return None
        site = find_site()
        if site.by == "amp":  # amp_patch itself scales gradients and copies master weights
            for tensor in written:
                self._forget(tensor)
            return None
        with current.without_casts():
            for tensor in written:
                self._begin(tensor, site, overload.name, is_gradient=is_gradient, is_sum=is_sum)
        return site

    def _is_wide_and_old(self, tensor: Tensor) -> bool:
        """Return whether a tensor is old (see `_is_old`) and wider than 16 bits.

        Copying it to a 16-bit tensor loses no change, because the tensor itself keeps the true values.
        """
        return tensor.dtype not in LOW_DTYPES and tensor.is_floating_point() and self._is_old(tensor)

    def note_young(self, op: Op) -> None:
        """Note the storages of the floating tensors that an op has made."""
        if not op.overload.written and not op.overload.is_alias:
            self._young.update(storage_of(tensor) for tensor in op.outputs() if tensor.is_floating_point())

    def _may_succeed(self, overload: Overload, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Return whether to follow an op that writes into no argument.

        Its result may replace a tensor that outlives the step, as in `total = total + loss`. An op on lists of tensors
        is followed if it computes with tensors that are followed already.
        """
        if not overload.is_pointwise and overload.name not in _FOLLOWED:
            return overload.is_in_bulk and self._twins.has_any(args)
        given = [tensor for tensor in tensors_in([*args, *kwargs.values()]) if tensor.dtype in LOW_DTYPES]
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given):
            return False
        return any(self._twins.find(tensor) is not None or self._is_old(tensor) for tensor in given)

    def _is_old(self, tensor: Tensor) -> bool:
        """Return whether a tensor is older than this step: no op of the step has made it. False for a tensor without an
        address.
        """
        address = storage_of(tensor)
        return address != 0 and address not in self._young

    def _begin(self, tensor: Tensor, site: Site, op: str, *, is_gradient: bool, is_sum: bool) -> None:
        """Begin to follow a tensor that is about to change: keep a copy of its values.

        Do nothing if the tensor is followed already, is not to be followed, or exceeds the budget.
        """
        if tensor.dtype not in LOW_DTYPES or not storage_of(tensor):
            return
        storage = tensor.untyped_storage()
        key = id(storage)
        is_judged = is_gradient or is_sum or self._is_old(tensor)
        if key in self._followed or not is_judged or self._name(tensor) is None:
            return
        size = storage.nbytes() // tensor.element_size()
        if key in self._done or size > BUDGET:
            return
        if size > self._left:
            self._is_full = True
            return
        self._left -= size
        flat = tensor.detach().as_strided((size,), (1,), 0)
        self._twins.put(flat, flat.float())
        is_temporary = not is_gradient and not self._is_old(tensor)
        source = self._make_source(site, op, is_gradient=is_gradient)
        source = replace(source, is_sum=is_sum, is_temporary=is_temporary)
        self._followed[key] = _Followed(flat, clone(flat), tensor.detach(), source)

    def _make_source(self, site: Site, op: str, *, is_gradient: bool) -> Source:
        optimizer = "" if self._optimizer is None else type(self._optimizer).__name__
        role = GRADIENTS if is_gradient else ""
        return Source(site.place, op, optimizer, role, self._find_module())

    def _forget(self, tensor: Tensor) -> None:
        """Stop following a tensor."""
        if storage_of(tensor):
            self._followed.pop(id(tensor.untyped_storage()), None)
            self._twins.drop(tensor)

    def follow(self, op: Op, site: Site) -> None:
        """Run an op in float32 on the twins of its inputs. The float32 results become twins of the op's results."""
        self._note_decay(op, site)
        if op.overload.is_in_bulk:
            self._follow_bulk(op)
            return
        outputs = op.floating_results()
        if is_random(op.function) or not outputs:
            for tensor in outputs:
                self._restart(tensor)
            return
        results = self._twins.compute(op)
        if len(results) != len(outputs):  # the op did not run in float32
            for tensor in _written_by(op.overload, op.args, op.kwargs):
                self._forget(tensor)
            return
        for tensor, exact in zip(outputs, results, strict=True):
            if tensor.dtype in LOW_DTYPES and tensor.shape == exact.shape:
                self._twins.put(tensor, exact)
        if not op.overload.written:
            self._note_successor(op, outputs[0], site)

    def _note_decay(self, op: Op, site: Site) -> None:
        """Count a weight decay `weight.mul_(factor)` whose factor is so close to 1 that it changes no 16-bit weight."""
        if self._optimizer is None or op.overload.name not in ("mul_", "_foreach_mul_") or len(op.args) < 2:
            return
        factor = op.args[1]
        if not isinstance(factor, float) or factor == 1:
            return
        for tensor in tensors_in([op.args[0]]):
            is_weight = tensor.dtype in LOW_DTYPES and storage_of(tensor) in self._weights
            if is_weight and abs(factor - 1) < torch.finfo(tensor.dtype).eps / 4:
                name = self._name(tensor) or ""
                self.tally.add_decay(self.step, type(self._optimizer).__name__, site.place, tensor, name)

    def _restart(self, tensor: Tensor) -> None:
        """Take the present values of a tensor as the true values, for example after an op that draws random numbers:
        the twin cannot draw the same ones.
        """
        if self._twins.find(tensor) is not None:
            self._twins.put(tensor, tensor.float())

    def _follow_bulk(self, op: Op) -> None:
        """Follow an op on lists of tensors, such as `_foreach_add_`, for the tensors in the lists that have a twin."""
        lists = [arg for arg in op.args if isinstance(arg, (list, tuple)) and arg and isinstance(arg[0], Tensor)]
        if not lists:
            return
        length = len(lists[0])
        chosen = [
            index
            for index in range(length)
            if any(len(each) == length and self._twins.find(each[index]) is not None for each in lists)
        ]
        if not chosen:
            return

        def choose(value: Any) -> Any:
            if isinstance(value, (list, tuple)) and len(value) == length:
                return [value[index] for index in chosen]
            return value

        args = [choose(arg) for arg in op.args]
        kwargs = {name: choose(value) for name, value in op.kwargs.items()}
        run = self._twins.run(op._replace(args=args, before=args, kwargs=kwargs))
        written = [index for index in op.overload.written if index < len(args)]
        targets = list(tensors_in(args[index] for index in written))
        if run is None:
            for tensor in targets:
                self._forget(tensor)
            return
        pairs = [*zip(targets, tensors_in(run.args[index] for index in written), strict=True)]
        outputs = [op.result[index] for index in chosen] if isinstance(op.result, (list, tuple)) else []
        pairs += zip(tensors_in(outputs), run.outputs(), strict=False)
        for tensor, value in pairs:
            if tensor.dtype in LOW_DTYPES and tensor.shape == value.shape:
                self._twins.put(tensor, value)

    # ---- tensors that are replaced -----------------------------------------------------------------------------------

    def _note_successor(self, op: Op, output: Tensor, site: Site) -> None:
        """Note that a result may replace the older tensor from which it was computed."""
        if output.dtype not in LOW_DTYPES or not storage_of(output):
            return
        for tensor in op.inputs():
            if tensor.shape != output.shape or tensor.dtype is not output.dtype or not storage_of(tensor):
                continue
            root = self._find_root(tensor)
            if root is None and self._is_old(tensor) and self._name(tensor) is not None:
                root = tensor.detach()
                self._confirm(tensor)
            if root is not None:
                key = id(output.untyped_storage())
                self._roots[key] = root
                source = self._make_source(site, op.overload.name, is_gradient=False)
                self._made[key] = weakref.ref(output.untyped_storage()), source
                return

    def _find_root(self, tensor: Tensor) -> Tensor | None:
        """Return the older tensor that a result of this step may replace. None if `tensor` is no such result."""
        storage = tensor.untyped_storage()
        known = self._made.get(id(storage))
        if known is None or known[0]() is not storage:  # another storage may have got the id
            return None
        return self._roots[id(storage)]

    def _confirm(self, tensor: Tensor) -> None:
        """If the step before made a tensor that this step reads, count its change.

        The script has kept the tensor, so it has taken the place of an older one.
        """
        storage = tensor.untyped_storage()
        for successor in self._successors:
            if successor.storage() is storage and successor.source.site:
                self._successors.remove(successor)
                name = self._name(tensor) or ""
                self.tally.add(self.step - 1, successor.source, successor.change, name, 0, tensor)
                return


def _written_by(overload: Overload, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that an op writes."""
    yield from tensors_in(args[index] for index in sorted(overload.written) if index < len(args))
    if isinstance(out := kwargs.get("out"), Tensor):
        yield out


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of the same shape."""
    return torch.empty(tensor.shape, device="meta").stride()
