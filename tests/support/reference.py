"""Mixed-precision training written out by hand, to compare the package with. Nothing here imports amp_patch."""

import torch
import torch.nn.functional as F
from torch import nn


def make_batches(count: int, size: int = 16, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """`count` batches of real handwritten digits: images [size, 1, 8, 8] float32 and labels [size] int64."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels).float().reshape(-1, 1, 8, 8) / 8 - 1
    targets = torch.tensor(labels).long()
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(seed))
    return [(images[index], targets[index]) for index in order.split(size)[:count]]


class Digits(nn.Module):
    """A small convolutional network with BatchNorm, LayerNorm and a shared residual, so that every kind of
    rule is met.
    """

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(2 * width)
        self.norm = nn.LayerNorm(32 * width)
        self.fc = nn.Linear(32 * width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = F.max_pool2d(F.relu(self.bn1(self.conv1(images))), 2)
        hidden = F.relu(self.bn2(self.conv2(hidden)))
        return self.fc(self.norm(hidden.flatten(1)))


def make_model(seed: int = 0, width: int = 8) -> Digits:
    torch.manual_seed(seed)
    return Digits(width)


def forward_with_casts(model: Digits, images: torch.Tensor, low: torch.dtype) -> torch.Tensor:
    """O1/O4 by hand: convolutions and the linear layer in `low`, LayerNorm in float32, BatchNorm and the rest as their
    input comes.
    """
    hidden = F.conv2d(images.to(low), model.conv1.weight.to(low), None, padding=1)
    hidden = F.max_pool2d(F.relu(model.bn1(hidden)), 2)
    hidden = F.conv2d(hidden, model.conv2.weight.to(low), model.conv2.bias.to(low), padding=1)
    hidden = F.relu(model.bn2(hidden)).flatten(1)
    hidden = F.layer_norm(
        hidden.float(), model.norm.normalized_shape, model.norm.weight, model.norm.bias, model.norm.eps
    )
    return F.linear(hidden.to(low), model.fc.weight.to(low), model.fc.bias.to(low))


def train_with_casts(
    model: Digits, optimizer: torch.optim.Optimizer, batches, low: torch.dtype, scale: float = 1.0
) -> list[float]:
    losses = []
    for images, targets in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(forward_with_casts(model, images, low).float(), targets)
        (loss * scale).backward()
        for parameter in model.parameters():
            parameter.grad.div_(scale)
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_with_masters(
    model: Digits, make_optimizer, batches, low: torch.dtype, scale: float = 1.0
) -> tuple[list[float], list[torch.Tensor]]:
    """O2/O5 by hand: a 16-bit model with float32 BatchNorm, stepped through float32 masters.

    Returns losses and masters.
    """
    masters = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
    for module in model.modules():
        if not isinstance(module, nn.BatchNorm2d):
            for parameter in module._parameters.values():
                if parameter is not None:
                    parameter.data = parameter.data.to(low)
    optimizer = make_optimizer(masters)
    losses = []
    for images, targets in batches:
        optimizer.zero_grad()
        model.zero_grad()
        loss = F.cross_entropy(model(images.to(low)).float(), targets)
        (loss * scale).backward()
        for parameter, master in zip(model.parameters(), masters, strict=True):
            master.grad = parameter.grad.float() / scale
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(model.parameters(), masters, strict=True):
                parameter.copy_(master)
        losses.append(loss.item())
    return losses, masters


def train_plainly(
    model: Digits, optimizer: torch.optim.Optimizer, batches, cast_model_to: torch.dtype | None = None
) -> list[float]:
    """O0 and O3 by hand."""
    if cast_model_to is not None:
        model.to(cast_model_to)
    losses = []
    for images, targets in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images if cast_model_to is None else images.to(cast_model_to)).float(), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
