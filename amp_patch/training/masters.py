"""`Masters`: which float32 master belongs to which 16-bit parameter, and keeping the two together."""

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..dtypes import LOW_DTYPES, is_opaque
from ..multi_tensor import Group, clone, copy_, eq, group, where
from ..reporting import warn
from ..torch_private import get_version

_LOADED = -2
"""The version of a master that was loaded together with its parameter."""

Pair = tuple[Tensor, Tensor]
"""A 16-bit parameter and its float32 master, of the same shape."""


class _State:
    """Version counters and addresses of tensors, read and compared in a few calls for all of them: a step asks for
    those of the whole model.
    """

    def __init__(self, tensors: list[Tensor], before: "_State | None" = None) -> None:
        self.versions = list(map(get_version, tensors))
        self.addresses = list(map(Tensor.data_ptr, tensors))
        # while these live, no other memory gets their addresses: `p.data = f(p.data)`, twice, would come back to the
        # first
        is_same = before is not None and before.addresses == self.addresses
        self.aliases: list[Tensor] = (
            before.aliases if before is not None and is_same else [tensor.detach() for tensor in tensors]
        )

    def see(self, index: int, tensor: Tensor) -> None:
        """Take over the state of one tensor."""
        self.versions[index], self.addresses[index], self.aliases[index] = (
            get_version(tensor),
            tensor.data_ptr(),
            tensor.detach(),
        )

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, _State) and self.versions == other.versions and self.addresses == other.addresses

    def differs_at(self, index: int, other: "_State") -> bool:
        return bool(self.versions[index] != other.versions[index] or self.addresses[index] != other.addresses[index])


class Masters:
    """The masters of a session.

    An optimizer step changes masters; people also change masters (SAM, Lookahead) and parameters (`nn.init`, weight
    clipping) by themselves. Both sides' version counters and addresses as of the last copy tell which side moved; if
    both did, the master counts.
    """

    def __init__(self) -> None:
        self._parameters: list[Tensor] = []
        self._masters: list[Tensor] = []
        self._index: dict[int, int] = {}  # by the parameter's id
        self._index_of_master: dict[int, int] = {}
        self._seen = (_State([]), _State([]))  # of parameters and of masters, as of the last copy
        self._pushed: dict[int, Tensor] = {}  # by index: the master at the last push, of parameters edited since
        self._groups: list[Group] | None = None  # of all, for pushing
        self._gradients: list[tuple[Tensor, Tensor]] = []  # of parameters before they were cast
        self.has_warned_of_copy = False
        self.is_compiled = False  # a model runs in compiled code, which brings the two sides together no more

    def add(self, parameter: Tensor, master: Tensor) -> None:
        """Register `master` (float32, same shape) as the master of `parameter`, in the place of one it had."""
        index = self._index.setdefault(id(parameter), len(self._parameters))
        if index == len(self._parameters):
            self._parameters.append(parameter)
            self._masters.append(master)
            for seen in self._seen:
                seen.versions.append(-1)
                seen.addresses.append(-1)
                seen.aliases.append(parameter)
        else:
            del self._index_of_master[id(self._masters[index])]
            self._masters[index] = master
        self._index_of_master[id(master)] = index
        self._groups = None
        self._pushed.pop(index, None)
        self._see(index)

    def keep_gradient(self, parameter: Tensor) -> None:
        """Take the gradient of a parameter that is about to be cast: its master is to have it as it is."""
        if parameter.grad is not None:
            self._gradients.append((parameter, parameter.grad))
            parameter.grad = None

    def return_gradients(self) -> None:
        """Give the gradients that were taken to the masters; a parameter that has none gets its own, cast."""
        gradients, self._gradients = self._gradients, []
        for parameter, gradient in gradients:
            master = self.get(parameter)
            if master is None:
                parameter.grad = gradient.to(parameter.dtype)
            else:
                master.grad = gradient

    def keep_only(self, parameter_ids: Collection[int]) -> None:
        """Forget the masters of all parameters but these."""
        kept = [index for index, parameter in enumerate(self._parameters) if id(parameter) in parameter_ids]
        self._parameters = [self._parameters[index] for index in kept]
        self._masters = [self._masters[index] for index in kept]
        for seen in self._seen:
            seen.versions = [seen.versions[index] for index in kept]
            seen.addresses = [seen.addresses[index] for index in kept]
            seen.aliases = [seen.aliases[index] for index in kept]
        self._index = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        self._index_of_master = {id(master): index for index, master in enumerate(self._masters)}
        self._groups = None
        self._pushed.clear()

    def get(self, parameter: Tensor) -> Tensor | None:
        """Return the master of `parameter`, or None."""
        index = self._index.get(id(parameter))
        return None if index is None else self._masters[index]

    def mark_updated(self, masters: Iterable[Tensor]) -> None:
        """Say that an optimizer stepped over these tensors: fused ones leave the version counter alone."""
        if not self._masters:
            return
        for master in masters:
            index = self._index_of_master.get(id(master))
            if index is not None:
                self._seen[1].versions[index] = -1

    def push(self, pairs: Collection[Pair] | None = None) -> None:
        """Copy masters (all, or those of `pairs`) to their parameters, in one kernel for each (device, dtype)."""
        if pairs is None or len(pairs) == len(self._parameters):
            if self._groups is None:
                self._groups = group(self._parameters, self._masters)
            copy_(self._groups)
            self._pushed.clear()
            self._seen = (_State(self._parameters, self._seen[0]), _State(self._masters, self._seen[1]))
        else:
            self._push_some([self._index[id(parameter)] for parameter, _ in pairs])

    def pull(self) -> None:
        """Copy parameters that were changed, but not by us, to their masters; leave masters that moved too.

        Warns, once, if masters moved and a compiled model may have run since with what its parameters held before.
        """
        if self.take_edits() and self.is_compiled:
            self.is_compiled = False
            warn(
                "masters were edited since the last step, and a compiled model does not see that by itself: call"
                " amp.refresh() after each edit, before the model runs"
            )

    def take_edits(self) -> bool:
        """Copy edited parameters to their masters; tell whether there are masters that moved, which are left."""
        return self._reconcile(pushing=False)

    def agree(self, parameter: Tensor) -> None:
        """Say that a parameter and its master, if it has one, have been given the same values.

        Whoever loads masters from a file of their own may do so by `master.data.copy_`, which nothing shows: the master
        is copied to the parameter once more.
        """
        index = self._index.get(id(parameter))
        if index is not None:
            self._pushed.pop(index, None)
            self._see(index)
            self._seen[1].versions[index] = _LOADED

    def sync(self) -> None:
        """Bring both sides together, whichever moved."""
        self._reconcile(pushing=True)

    def _push_some(self, indices: list[int]) -> None:
        copy_(group([self._parameters[index] for index in indices], [self._masters[index] for index in indices]))
        for index in indices:
            self._pushed.pop(index, None)
            self._see(index)

    def _take_over(self, index: int) -> None:
        """Have a master follow a parameter that was edited, element by element."""
        parameter, master = self._parameters[index], self._masters[index]
        with torch.inference_mode(False), torch.no_grad():
            if index not in self._pushed:
                self._pushed[index] = clone(master)
            pushed = self._pushed[index]
            edited = torch.empty_like(master, requires_grad=False)
            copy_([([edited], [parameter])])
            edited = where(_is_rounded(parameter, master), master, edited)
            copy_([([master], [where(_is_rounded(parameter, pushed), pushed, edited)])])

    def _see(self, index: int) -> None:
        for seen, tensors in zip(self._seen, (self._parameters, self._masters), strict=True):
            seen.see(index, tensors[index])

    def _reconcile(self, *, pushing: bool) -> bool:
        """Tell whether masters moved."""
        parameters, masters = _State(self._parameters, self._seen[0]), _State(self._masters, self._seen[1])
        if (parameters, masters) == self._seen:
            return False
        moved: list[int] = []
        for index in range(len(self._parameters)):
            is_moved = masters.differs_at(index, self._seen[1])
            is_loaded = self._seen[1].versions[index] == _LOADED
            if parameters.differs_at(index, self._seen[0]) and (is_loaded or not is_moved):
                self._take_over(index)
                self._see(index)
            if is_moved:
                moved.append(index)
        if pushing and moved:
            self._push_some(moved)
        return bool(moved)


def _is_rounded(parameter: Tensor, master: Tensor) -> Tensor:
    """Return where a 16-bit parameter holds the rounded value of a master: bool, of their shape."""
    rounded = torch.empty_like(parameter, requires_grad=False)
    copy_([([rounded], [master])])
    is_rounded: Tensor = eq(parameter, rounded)
    return is_rounded


# ---- in an optimizer -------------------------------------------------------------------------------------------------


class OptimizerMasters:
    """The masters of one optimizer, in the place of the 16-bit parameters of its groups.

    Args:
        masters: where the session keeps all masters.
        get_optimizer: returns the optimizer, or None once it is gone.
        use_masters: give every 16-bit parameter a float32 master; without, only cast its state.
    """

    def __init__(self, masters: Masters, get_optimizer: Callable[[], Optimizer | None], *, use_masters: bool) -> None:
        self.masters = masters
        self._get_optimizer = get_optimizer
        self.use_masters = use_masters
        self._pairs: dict[int, Pair] = {}  # by the master's id
        self._cast: list[tuple[weakref.ref[Optimizer], Tensor, torch.dtype]] = []  # whose state was cast, from what

    def pairs(self) -> Collection[Pair]:
        """Return each 16-bit parameter with its master."""
        return self._pairs.values()

    def parameter_of(self, tensor: Tensor) -> Tensor:
        """Return the parameter that a master stands for; any other tensor itself."""
        return self._pairs[id(tensor)][0] if id(tensor) in self._pairs else tensor

    def place(self, optimizer: Optimizer, group: dict[str, Any], float32_data: dict[int, Tensor]) -> None:
        """Put a master in the place of each 16-bit parameter of a group, with the optimizer state that it had.

        `float32_data` holds values of parameters from before they were cast, by the parameter's id.
        """
        for index, parameter in enumerate(group["params"]):
            if parameter.dtype not in LOW_DTYPES or is_opaque(parameter):
                continue
            if not self.use_masters:
                if id(parameter) in float32_data:
                    self._cast.append((weakref.ref(optimizer), parameter, float32_data[id(parameter)].dtype))
                    _cast_state(optimizer, parameter, parameter.dtype)
                continue
            master = self.masters.get(parameter)  # another optimizer of the session may have made it
            if master is None:
                data = float32_data.get(id(parameter))
                data = parameter.detach().float() if data is None else data
                master = torch.nn.Parameter(data, requires_grad=parameter.requires_grad)
                self.masters.add(parameter, master)
            self._pairs[id(master)] = (parameter, master)
            group["params"][index] = master
            if parameter in optimizer.state:
                optimizer.state[master] = optimizer.state[parameter]
                del optimizer.state[parameter]

    def find(self) -> tuple[list[Tensor], list[Pair]]:
        """Return what is in the groups of the optimizer now: parameters without a master, and those with one."""
        plain: list[Tensor] = []
        pairs: list[Pair] = []
        optimizer = self._get_optimizer()
        if optimizer is None:
            return plain, pairs
        for param_group in optimizer.param_groups:
            for parameter in param_group["params"]:
                pair = self._pairs.get(id(parameter))
                if pair is None:
                    plain.append(parameter)
                else:
                    pairs.append(pair)
        return plain, pairs

    def read(self) -> tuple[list[Tensor], list[Pair]]:
        """Like `find`, but 16-bit parameters that somebody has put into a group get masters first."""
        plain, pairs = self.find()
        for parameter in plain:
            if parameter.dtype in LOW_DTYPES and not is_opaque(parameter):
                self._place_in_all()
                return self.find()
        return plain, pairs

    def _place_in_all(self) -> None:
        optimizer = self._get_optimizer()
        if optimizer is not None:
            for param_group in optimizer.param_groups:
                self.place(optimizer, param_group, {})

    def restore(self, optimizer: Any) -> None:
        """Put the parameters back into the groups of an optimizer (None if it is gone), and its state into the dtype
        that it had.

        Interrupted, it is to be called again.
        """
        if optimizer is not None:
            self._put_parameters_back(optimizer)
        self._pairs.clear()
        self.masters = Masters()  # whoever wraps `step` for good (an LR scheduler) may keep this object
        for reference, parameter, dtype in self._cast:
            if (owner := reference()) is not None:
                _cast_state(owner, parameter, dtype)
        self._cast.clear()

    def _put_parameters_back(self, optimizer: Any) -> None:
        for param_group in optimizer.param_groups:
            for index, master in enumerate(param_group["params"]):
                if id(master) in self._pairs:
                    parameter, _ = self._pairs[id(master)]
                    if master in optimizer.state:
                        optimizer.state[parameter] = optimizer.state[master]
                    param_group["params"][index] = parameter
        for _, master in self._pairs.values():
            optimizer.state.pop(master, None)

    @contextlib.contextmanager
    def presented(self, optimizer: Optimizer) -> Iterator[None]:
        """Have the groups and the state of an optimizer show the model's parameters inside the block."""
        parameters = {key: parameter for key, (parameter, _) in self._pairs.items()}
        masters = {id(parameter): master for parameter, master in self._pairs.values()}
        _exchange(optimizer, parameters)
        try:
            yield
        finally:
            _exchange(optimizer, masters)

    def drop_gradients(self, but: Collection[int] = ()) -> None:
        """Forget the gradients of these masters, but for some, by id."""
        for key, (_, master) in self._pairs.items():
            if key not in but:
                master.grad = None

    def push(self) -> None:
        """Copy these masters to their parameters. Places none: helpers of torch may have groups show parameters."""
        _, pairs = self.find()
        if pairs:
            self.masters.push(pairs)


def _exchange(optimizer: Optimizer, others: dict[int, Tensor]) -> None:
    """Put other tensors in the place of those with some ids, in the groups and in the state, which stay in order."""
    for param_group in optimizer.param_groups:
        param_group["params"][:] = [others.get(id(tensor), tensor) for tensor in param_group["params"]]
    entries = [(others.get(id(tensor), tensor), entry) for tensor, entry in optimizer.state.items()]
    optimizer.state.clear()
    optimizer.state.update(entries)


def _cast_state(optimizer: Optimizer, parameter: Tensor, dtype: torch.dtype) -> None:
    """Cast a parameter's state as torch does when it loads one: all floating tensors but the step count."""
    for name, value in optimizer.state.get(parameter, {}).items():
        if isinstance(value, Tensor) and value.is_floating_point() and name != "step":
            optimizer.state[parameter][name] = value.to(dtype)
