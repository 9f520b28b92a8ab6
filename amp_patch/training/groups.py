"""`Groups`: the parameter groups of an optimizer, with masters in place of 16-bit parameters."""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..dtypes import LOW_DTYPES, is_opaque
from .masters import Masters, Pair
from .split_masters import can_split, has_gradient


class Groups:
    """The parameter groups of one optimizer, read at each call because scripts change them.

    Args:
        optimizer: held by a weak reference.
        masters: the masters of the session.
        use_masters: whether every 16-bit parameter that is not opaque (`dtypes.is_opaque`) gets a float32 master. If
            False, only the state of cast parameters is cast.
        on_new_parameters: called when a script has put 16-bit parameters into a group, and they got masters.

    Attributes:
        are_split: whether new masters are split masters, where `can_split` allows it (see `split_masters`).
        whole: the parameters of each group while the groups hold only a part of them, else None.
        placed: each parameter that was replaced by its master in these groups, with the master, by the master's id. A
            pair stays even if the script removes the master from the groups.
    """

    def __init__(
        self, optimizer: Optimizer, masters: Masters, *, use_masters: bool, on_new_parameters: Callable[[], None]
    ) -> None:
        self.use_masters = use_masters
        self.are_split = False
        self.whole: list[list[Tensor]] | None = None
        self.placed: dict[int, Pair] = {}
        self._on_new_parameters = on_new_parameters
        self._masters = masters
        self._optimizer = weakref.ref(optimizer)
        self._inner: list[weakref.ref[Optimizer]] = []  # optimizers inside it, as in SAM and Lookahead
        # optimizer and parameter of each state that was cast, with the dtype to cast it back to
        self._cast_states: list[tuple[weakref.ref[Optimizer], Tensor, torch.dtype]] = []

    # ---- reading -----------------------------------------------------------------------------------------------------

    def parameters(self) -> list[Tensor]:
        """Return the contents of the groups: masters, and parameters without a master."""
        parameters: list[Tensor] = []
        optimizer = self._optimizer()
        if optimizer is not None:
            for group in optimizer.param_groups:
                parameters += group["params"]
        return parameters

    def model_parameters(self) -> list[Tensor]:
        """Like `parameters`, but with the parameter of the model in place of each master."""
        parameters: list[Tensor] = []
        optimizer = self._optimizer()
        if optimizer is None:
            return parameters
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                pair = self._masters.pairs.get(id(tensor))
                parameters.append(tensor if pair is None else pair[0])
        return parameters

    def pairs(self) -> list[Pair]:
        """Return each 16-bit parameter with its master, if the master is in the groups."""
        pairs: list[Pair] = []
        for tensor in self.parameters():
            pair = self._masters.pairs.get(id(tensor))
            if pair is not None:
                pairs.append(pair)
        return pairs

    def read(self) -> tuple[list[Tensor], list[Pair]]:
        """Return the parameters without a master, and each other parameter with its master.

        With `use_masters`, a 16-bit parameter that a script has put into a group gets a master first, unless it is
        opaque.
        """
        plain: list[Tensor] = []
        pairs: list[Pair] = []
        optimizer = self._optimizer()
        if optimizer is None:
            return plain, pairs
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                pair = self._masters.pairs.get(id(tensor))
                if pair is not None:
                    pairs.append(pair)
                elif self.use_masters and tensor.dtype in LOW_DTYPES and not is_opaque(tensor):
                    self._place_in_all()
                    self._on_new_parameters()
                    return self.read()  # start again, because the groups have changed
                else:
                    plain.append(tensor)
        return plain, pairs

    def has_gradients(self) -> bool:
        """Return whether some parameter or master has a gradient."""
        return any(map(has_gradient, (*self.parameters(), *self.model_parameters())))

    # ---- putting masters in, and taking them out ---------------------------------------------------------------------

    def adopt_inner(self, optimizer: Optimizer) -> None:
        """Also manage the groups of an optimizer that this one holds."""
        self._inner.append(weakref.ref(optimizer))

    def place(self, optimizer: Optimizer, group: dict[str, Any], float32_data: dict[int, Tensor]) -> None:
        """With `use_masters`, replace each 16-bit parameter of a group by its master, and move its optimizer state to
        the master. Otherwise cast the state of each parameter in `float32_data`.

        `float32_data` has the values of parameters before they were cast, by the parameter's id.
        """
        for index, parameter in enumerate(group["params"]):
            if parameter.dtype not in LOW_DTYPES or is_opaque(parameter):  # such as a quantized weight
                continue
            if self.use_masters:
                master = self._find_master(parameter, float32_data.get(id(parameter)))
                self.placed[id(master)] = parameter, master
                group["params"][index] = master
            elif id(parameter) in float32_data:
                self._cast_states.append((weakref.ref(optimizer), parameter, float32_data[id(parameter)].dtype))
                _cast_state(optimizer, parameter, parameter.dtype)
        if self.use_masters:
            # all states, not only of this group: load_state_dict stores them under the parameters of the model
            for key in list(optimizer.state):
                _move_state(optimizer, key, self._masters.get(key))

    def _find_master(self, parameter: Tensor, data: Tensor | None) -> Tensor:
        """Return the master of a parameter. Make it unless an optimizer of the session has made it before."""
        master = self._masters.get(parameter)
        if master is None:
            if self.are_split and can_split(parameter):
                return self._masters.add_split(parameter, data)
            if data is None:
                data = parameter.detach().float()
            master = torch.nn.Parameter(data, requires_grad=parameter.requires_grad)
            self._masters.add(parameter, master)
        return master

    def restore(self) -> None:
        """Put the parameters back into the groups, and cast states back to their earlier dtype."""
        self._take_out()
        # before the parameters change: they are the upper halves of split masters
        self._masters.open([master for _, master in self.placed.values()])
        self.placed.clear()
        for reference, parameter, dtype in self._cast_states:
            if (owner := reference()) is not None:
                _cast_state(owner, parameter, dtype)
        self._cast_states.clear()

    @contextlib.contextmanager
    def without_masters(self) -> Iterator[None]:
        """Inside the block, groups and state hold the parameters of the model instead of masters."""
        self._take_out()
        try:
            yield
        finally:
            if self.use_masters:
                self._place_in_all()

    def _all_optimizers(self) -> list[Optimizer]:
        """Return the optimizer and the optimizers inside it, if they are alive."""
        alive: list[Optimizer] = []
        for reference in (self._optimizer, *self._inner):
            optimizer = reference()
            if optimizer is not None:
                alive.append(optimizer)
        return alive

    def _place_in_all(self) -> None:
        """Place masters in all groups of the optimizer and of the optimizers inside it."""
        for optimizer in self._all_optimizers():
            for group in optimizer.param_groups:
                self.place(optimizer, group, {})

    def put_back(self) -> None:
        """Let the groups hold all their parameters again, after a step in parts."""
        optimizer = self._optimizer()
        if self.whole is not None and optimizer is not None:
            for group, parameters in zip(optimizer.param_groups, self.whole, strict=True):
                group["params"] = parameters
        self.whole = None

    def _take_out(self) -> None:
        """Put the parameters of the model back into the groups, and move the states back to them."""
        self.put_back()  # an interrupt may have cut a step in parts short
        pairs = self._masters.pairs
        for optimizer in self._all_optimizers():
            for group in optimizer.param_groups:
                for index, tensor in enumerate(group["params"]):
                    if id(tensor) in pairs:
                        group["params"][index] = pairs[id(tensor)][0]
            for key in list(optimizer.state):
                if id(key) in pairs:
                    _move_state(optimizer, key, pairs[id(key)][0])


def _move_state(optimizer: Optimizer, key: Tensor, target: Tensor | None) -> None:
    """Move the optimizer state of `key` to `target`. Do nothing if `target` is None."""
    if target is not None:
        optimizer.state[target] = optimizer.state[key]
        del optimizer.state[key]


def _cast_state(optimizer: Optimizer, parameter: Tensor, dtype: torch.dtype) -> None:
    """Cast the state of a parameter: all floating tensors except the step count."""
    for name, value in optimizer.state.get(parameter, {}).items():
        # in 16 bits a step count would stop at 256 (bfloat16) or 2048 (float16)
        if isinstance(value, Tensor) and value.is_floating_point() and name != "step":
            optimizer.state[parameter][name] = value.to(dtype)
