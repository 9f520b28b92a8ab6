"""Casts and module rules follow weights that a script changes by hand, and modules that it replaces between two calls.

Guards: native/session, training/rule_regions, casting/autocast, casting/weight_cache.
"""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from list_files import write_list
from torch import Tensor, nn

from amp_patch import native

LOW = torch.bfloat16


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))


def batch(seed: int = 1) -> tuple[Tensor, Tensor]:
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(seed))
    return x, x[:, :1] * 2


def loss_of(net: nn.Module, seed: int = 1) -> Tensor:
    x, y = batch(seed)
    return F.mse_loss(net(x).float(), y)


# ---- whole scripts in one region: each yields the loss of its training -----------------------------------------------


def sgd_by_hand() -> Iterator[Tensor]:
    net = make_net()
    for _ in range(20):
        net.zero_grad()
        loss = loss_of(net)
        loss.backward()
        for weight in net.parameters():
            weight.data.add_(weight.grad, alpha=-0.05)  # type: ignore[arg-type]
        yield loss


def soft_target() -> Iterator[Tensor]:
    net, target = make_net(), make_net()
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    for _ in range(20):
        x, y = batch()
        loss = F.mse_loss(net(x).float(), y / 2 + target(x).detach().float() / 2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for slow, fast in zip(target.parameters(), net.parameters(), strict=True):
            slow.data.copy_(0.5 * slow.data + 0.5 * fast.data)
        yield loss


def adversarial_weights() -> Iterator[Tensor]:
    """Perturb the weights by their gradients, train there, and put them back."""
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    for _ in range(20):
        loss_of(net).backward()
        kept = [weight.data.clone() for weight in net.parameters()]
        for weight in net.parameters():
            weight.data += 0.5 * weight.grad  # type: ignore[operator]
        loss = loss_of(net)
        loss.backward()
        for weight, value in zip(net.parameters(), kept, strict=True):
            weight.data = value
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def clipped_weights() -> Iterator[Tensor]:
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), 0.5)
    for _ in range(20):
        loss = loss_of(net)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for weight in net.parameters():
            weight.data.clamp_(-0.1, 0.1)
        yield loss


def outer_loop() -> Iterator[Tensor]:
    """Train a copy of the weights for a while, and move part of the way there."""
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    for _ in range(5):
        start = [weight.data.clone() for weight in net.parameters()]
        for _ in range(4):
            loss = loss_of(net)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield loss
        for weight, value in zip(net.parameters(), start, strict=True):
            weight.data.copy_(value + 0.5 * (weight.data - value))


def averaged_weights() -> Iterator[Tensor]:
    """Evaluate a moving average of the weights, with gradients enabled."""
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    average = [weight.data.clone() for weight in net.parameters()]
    for _ in range(20):
        loss = loss_of(net)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        kept = [weight.data.clone() for weight in net.parameters()]
        for weight, value in zip(net.parameters(), average, strict=True):
            value.lerp_(weight.data, 0.5)
            weight.data.copy_(value)
        yield loss_of(net, 2)
        for weight, value in zip(net.parameters(), kept, strict=True):
            weight.data.copy_(value)


def evolution() -> Iterator[Tensor]:
    """Keep a random change of the weights if it is better."""
    net, generator = make_net(), torch.Generator().manual_seed(3)
    best = loss_of(net)
    for _ in range(20):
        change = [0.1 * torch.randn(weight.shape, generator=generator) for weight in net.parameters()]
        for weight, value in zip(net.parameters(), change, strict=True):
            weight.data += value
        loss = loss_of(net)
        if loss < best:
            best = loss
        else:
            for weight, value in zip(net.parameters(), change, strict=True):
                weight.data -= value
        yield best


def weights_of_numpy() -> Iterator[Tensor]:
    """An optimizer of another package, which writes through numpy."""
    net = make_net()
    for _ in range(20):
        net.zero_grad()
        loss = loss_of(net)
        loss.backward()
        for weight in net.parameters():
            weight.detach().numpy()[...] -= 0.05 * weight.grad.numpy()  # type: ignore[union-attr]
        yield loss


SCRIPTS = [
    sgd_by_hand,
    soft_target,
    adversarial_weights,
    clipped_weights,
    outer_loop,
    averaged_weights,
    evolution,
    weights_of_numpy,
]


@pytest.mark.parametrize("train", SCRIPTS, ids=lambda train: str(train.__name__))
def test_weights_that_are_changed_by_hand_train_as_in_float32(train: Callable[[], Iterator[Tensor]]) -> None:
    expected = [loss.item() for loss in train()]
    with native.install("O4", everywhere=True):
        losses = [loss.item() for loss in train()]
    assert losses == pytest.approx(expected, rel=0.02, abs=0.02)
    assert abs(expected[-1] - expected[0]) > 0.1  # what keeps old copies shows


@pytest.mark.parametrize("keeps", [True, False], ids=["torch keeps copies", "torch keeps none"])
def test_a_region_sees_an_edit_where_torch_sees_it(keeps: bool, tmp_path: Path) -> None:
    path = write_list(tmp_path, "whitelist: [mul]")
    weight = nn.Parameter(torch.ones(2, 2))
    seen = []
    with native.install(lists=path), torch.autocast("cpu", LOW, cache_enabled=keeps):
        for _ in range(2):
            seen.append((torch.mul(weight, 1.0)[0, 0].item(), torch.mm(weight, torch.eye(2))[0, 0].item()))
            weight.data.fill_(3.0)
    assert [ours for ours, _ in seen] == [torchs for _, torchs in seen] == [1.0, 1.0 if keeps else 3.0]


# ---- rules -----------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Notes the dtype that its head gives."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.head: nn.Module = nn.Linear(4, 4)
        self.dtypes: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        for block in self.blocks:
            x = block(x)
        x = self.head(x)
        self.dtypes.append(x.dtype)
        return x


class LoRA(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(4, 2), nn.Linear(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))  # type: ignore[no-any-return]


class Half(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


def swap_directly(net: Net) -> None:
    net._modules["head"] = nn.Linear(4, 4)


CHANGES: dict[str, Callable[[Net], object]] = {
    "replaced": lambda net: setattr(net, "head", nn.Linear(4, 4)),
    "replaced in the table": swap_directly,
    "lora": lambda net: setattr(net, "head", LoRA(net.head)),
    "sequence": lambda net: setattr(net, "head", nn.Sequential(net.head, nn.Linear(4, 4))),
    "parametrized": lambda net: nn.utils.parametrize.register_parametrization(net.head, "weight", Half()),
    "copied": lambda net: setattr(net, "head", copy.deepcopy(net.body)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_rule_holds_for_what_bears_the_name_when_it_is_called(
    change: Callable[[Net], object], tmp_path: Path
) -> None:
    net = Net()
    with native.install(lists=write_list(tmp_path, "modules: [{match: head, run: float32}]")):
        for _ in range(2):
            with torch.autocast("cpu", LOW):
                net(torch.ones(1, 4))
                assert net.body(torch.ones(1, 4)).dtype is LOW
            change(net)
        with torch.autocast("cpu", LOW):
            assert net.head(torch.ones(1, 4)).dtype is torch.float32
    assert set(net.dtypes) == {torch.float32}


def test_a_rule_does_not_follow_a_module_to_another_name(tmp_path: Path) -> None:
    net = Net()
    with native.install(lists=write_list(tmp_path, "modules: [{match: blocks.1, run: float32}]")):
        for _ in range(2):
            with torch.autocast("cpu", LOW):
                net(torch.ones(1, 4))
                dtypes = [block(torch.ones(1, 4)).dtype for block in net.blocks]
                assert [dtype is torch.float32 for dtype in dtypes] == [index == 1 for index in range(len(net.blocks))]
            net.blocks.insert(1, nn.Linear(4, 4))
            net.blocks[2] = copy.deepcopy(net.blocks[1])


@pytest.mark.parametrize(
    "wrap", [nn.DataParallel, lambda net: torch.compile(net, backend="eager")], ids=["parallel", "compiled"]
)
def test_a_rule_sees_a_change_through_a_wrapper(wrap: Callable[[Net], Callable[..., Tensor]], tmp_path: Path) -> None:
    net = Net()
    with native.install(lists=write_list(tmp_path, "modules: [{match: head, run: float32}]")):
        for _ in range(2):
            with torch.autocast("cpu", LOW):
                assert wrap(net)(torch.ones(1, 4)).dtype is torch.float32
            net.head = nn.Linear(4, 4)


def test_the_copies_of_a_parallel_call_share_the_rules_of_the_original(tmp_path: Path) -> None:
    net = Net()
    with native.install(lists=write_list(tmp_path, "modules: [{match: head, run: float32}]")):
        with torch.autocast("cpu", LOW):
            net(torch.ones(1, 4))
        hooks = len(net.head._forward_pre_hooks)
        for _ in range(2):
            (copied,) = replicate_on_cpu(net)
            with torch.autocast("cpu", LOW):
                assert copied(torch.ones(1, 4)).dtype is torch.float32
        assert len(net.head._forward_pre_hooks) == hooks


def replicate_on_cpu(net: Net) -> list[nn.Module]:
    """Make one copy as `torch.nn.parallel.replicate` does for each GPU, with the parameters as plain attributes."""
    copies = {module: module._replicate_for_data_parallel() for module in net.modules()}
    for module, copied in copies.items():
        for name, child in module._modules.items():
            copied._modules[name] = copies[child]  # type: ignore[index]
        for name, parameter in module._parameters.items():
            setattr(copied, name, parameter * 1.0)  # type: ignore[operator]
    return [copies[net]]


class Criterion(nn.Module):
    """Has no parameters, and is called by the script; overflows float16."""

    def forward(self, *, z: Tensor) -> Tensor:
        return torch.exp(z @ z.T).mean()


def test_a_rule_by_type_acts_in_a_criterion_and_in_its_keyword_arguments(tmp_path: Path) -> None:
    net = Net()
    rules = f"modules: [{{type: {__name__}.Criterion, run: float32}}]"
    with native.install(lists=write_list(tmp_path, rules)):
        for _ in range(2):
            with torch.autocast("cpu", torch.float16):
                z = net(torch.ones(2, 4))
                assert Criterion()(z=9 * z / z.norm()).isfinite()  # exp(40)


class EntersRegion(nn.Module):
    """Enters the first region of the script in its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", LOW):
            return self.layer(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["1", "1.layer", "**"])
def test_a_rule_acts_in_the_first_call_of_the_module_that_enters_the_first_region(name: str, tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(4, 4), EntersRegion())
    with native.install(lists=write_list(tmp_path, f'modules: [{{match: "{name}", run: float32}}]')):
        assert [net(torch.ones(1, 4)).dtype for _ in range(2)] == [torch.float32] * 2


class Island(nn.Module):
    """Computes in 16 bits, in an island of plain torch and in a region inside of the island."""

    def forward(self, x: Tensor) -> list[torch.dtype]:
        dtypes = [(x @ x).dtype]
        with torch.autocast("cpu", enabled=False):
            dtypes.append((x.float() @ x.float()).dtype)
            dtypes.append((x.to(LOW) @ x.to(LOW)).dtype)
            with torch.autocast("cpu", LOW):
                dtypes.append((x @ x).dtype)
        dtypes.append((x @ x).dtype)
        return dtypes


@pytest.mark.parametrize("run", ["low", "float32"])
def test_an_island_of_plain_torch_wins_over_a_rule(run: str, tmp_path: Path) -> None:
    expected = LOW if run == "low" else torch.float32
    holder = nn.Sequential(Island())
    with native.install(lists=write_list(tmp_path, f"modules: [{{match: '0', run: {run}}}]")):
        for _ in range(2):
            with torch.autocast("cpu", LOW):
                dtypes = holder(torch.ones(2, 2))
    assert dtypes == [expected, torch.float32, LOW, expected, expected]
