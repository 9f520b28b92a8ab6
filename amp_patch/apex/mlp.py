"""`apex.mlp`: linear layers, each followed by an activation, computed by torch's functions."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ModelError

_NAMES = ("none", "relu", "sigmoid")
_ACTIVATIONS: tuple[Callable[[Tensor], Tensor], ...] = (lambda x: x, F.relu, torch.sigmoid)
"""Apex's numbers of activations are their indices here."""


def mlp_function(bias: int, activation: int, *args: Tensor) -> Tensor:
    """Return the output of the layers, shape (n, last size).

    Args:
        bias: whether there are biases.
        activation: 0 for none, 1 for ReLU, 2 for the sigmoid. It follows every layer, also the last.
        args: the input, shape (n, first size), then all weights, then all biases if there are any.
    """
    x, *parameters = args
    count = len(parameters) // 2 if bias else len(parameters)
    for index in range(count):
        bias_of_layer = parameters[count + index] if bias else None
        x = _ACTIVATIONS[activation](F.linear(x, parameters[index], bias_of_layer))
    return x


class MlpFunction(torch.autograd.Function):
    """`mlp_function` as an autograd function, for scripts that call its `forward` and `backward`."""

    @staticmethod
    def forward(ctx: Any, bias: int, activation: int, *args: Tensor) -> Tensor:
        """Return the output, and keep the arguments for `backward`."""
        ctx.save_for_backward(*args)
        ctx.bias, ctx.activation = bias, activation
        return mlp_function(bias, activation, *args)

    @staticmethod
    def backward(ctx: Any, grad_o: Tensor) -> tuple[Tensor | None, ...]:
        """Return None for `bias` and `activation`, then the gradients of `args`. Computes the layers a second time."""
        # without `create_graph`, autograd runs a backward with gradients disabled, but the second forward needs them
        with torch.enable_grad():
            args = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
            output = mlp_function(ctx.bias, ctx.activation, *args)
        return (None, None, *torch.autograd.grad(output, args, grad_o.to(output.dtype)))


class MLP(nn.Module):
    """Linear layers, each followed by an activation, also the last one.

    Parameters are `weight_0`, `bias_0`, `weight_1`, ...; there are no `bias_...` without `bias`.

    Args:
        mlp_sizes: the size of the input, then the size of each layer's output.
        bias: whether layers have a bias.
        activation: "none", "relu" or "sigmoid". Anything else raises ModelError.
    """

    def __init__(self, mlp_sizes: Sequence[int], bias: bool = True, activation: str = "relu") -> None:
        super().__init__()
        if activation not in _NAMES:
            raise ModelError(f"MLP: activation={activation!r} must be one of {', '.join(_NAMES)}")
        self.mlp_sizes = list(mlp_sizes)
        self.num_layers = len(self.mlp_sizes) - 1
        self.bias = int(bias)
        self.activation = _NAMES.index(activation)
        for index in range(self.num_layers):
            inputs, outputs = self.mlp_sizes[index : index + 2]
            setattr(self, f"weight_{index}", nn.Parameter(torch.empty(outputs, inputs)))
            if self.bias:
                setattr(self, f"bias_{index}", nn.Parameter(torch.empty(outputs)))
        self.reset_parameters()

    @property
    def weights(self) -> list[Tensor]:
        """The weights of the layers, shape (outputs, inputs) each."""
        return [getattr(self, f"weight_{index}") for index in range(self.num_layers)]

    @property
    def biases(self) -> list[Tensor]:
        """The biases of the layers, shape (outputs,) each. Empty if layers have no bias."""
        return [getattr(self, f"bias_{index}") for index in range(self.num_layers if self.bias else 0)]

    def reset_parameters(self) -> None:
        """Draw weights with variance 2 / (inputs + outputs), and biases with variance 1 / outputs, as in Apex."""
        for weight in self.weights:
            nn.init.normal_(weight, 0.0, math.sqrt(2.0 / sum(weight.shape)))
        for bias in self.biases:
            nn.init.normal_(bias, 0.0, math.sqrt(1.0 / bias.numel()))

    def forward(self, input: Tensor) -> Tensor:
        """Return the output, shape (n, last size), for an input of shape (n, first size)."""
        return mlp_function(self.bias, self.activation, input, *self.weights, *self.biases)

    def extra_repr(self) -> str:
        """Return the text that `print(model)` shows in the brackets of this layer."""
        return f"MLP sizes: {self.mlp_sizes}, Bias={self.bias}, activation={_NAMES[self.activation]}"
