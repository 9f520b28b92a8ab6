"""A network whose weights are cached, and the same with its weights cast afresh in each forward pass."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LOW = torch.bfloat16
SIZE = 4


class Net(nn.Module):
    """Two square layers and a convolution: transposing a weight keeps its shape and address."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE, bias=False)
        self.third = nn.Conv1d(SIZE, SIZE, 1)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.linear(x, self.first.weight, self.first.bias) @ self.second.weight
        return F.conv1d(hidden.unsqueeze(-1), self.third.weight, self.third.bias).squeeze(-1)


def by_hand(net: Net, x: Tensor, compute: str) -> Tensor:
    """`net(x)`, cast afresh."""

    def product(op: Callable[..., Tensor], *operands: Tensor) -> Tensor:
        low = [value.to(LOW) for value in operands]
        return op(*low) if compute == "native" else op(*[value.float() for value in low]).to(LOW)

    hidden = product(torch.matmul, product(F.linear, x, net.first.weight, net.first.bias), net.second.weight)
    return product(F.conv1d, hidden.unsqueeze(-1), net.third.weight, net.third.bias).squeeze(-1)
