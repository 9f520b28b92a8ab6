"""Threads, worker processes, checkpointed activations, and torch.compile beside the patches."""

import threading
import warnings

import pytest
import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from reference import make_batches, make_model
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset
from torch_state import find_changes
from training import backward, take_step

import amp_patch as amp


def initialize(level="O4", model=None, **options):
    model = make_model() if model is None else model
    return amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.05), opt_level=level, verbosity=0, **options)


mp.get_context("forkserver").set_forkserver_preload(
    ["torch", "torch._dynamo"]
)  # as clean as "spawn", and starts sooner


# ---- workers ---------------------------------------------------------------------------------------------------------


class Products(Dataset):
    """Items that a patched matmul would make 16-bit."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.matmul(torch.full((2, 2), index + 0.1), torch.eye(2)), str(
            torch.matmul(torch.ones(1, 1), torch.ones(1, 1)).dtype
        )


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_data_loader_workers_see_plain_torch(method):
    expected = torch.stack([Products()[index][0] for index in range(4)])
    _model, _optimizer = initialize()
    items, dtypes = [], set()
    for batch, names in DataLoader(Products(), batch_size=2, num_workers=1, multiprocessing_context=method):
        items.append(batch)
        dtypes.update(names)
    assert dtypes == {"torch.float32"} and torch.equal(torch.cat(items), expected)
    assert torch.matmul(torch.ones(1, 1), torch.ones(1, 1)).dtype is torch.bfloat16


def train_in_a_worker(queue, level):
    torch.set_num_threads(1)
    model, optimizer = initialize(level)
    for images, targets in make_batches(3):
        take_step(F.cross_entropy(model(images), targets), optimizer)
    value = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    amp.reset()
    queue.put((value, find_changes()))


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_initialize_works_in_a_worker_process(method):
    context = mp.get_context(method)
    queue = context.Queue()
    _model, _optimizer = initialize("O1")  # and the parent's own session is none of the worker's business
    worker = context.Process(target=train_in_a_worker, args=(queue, "O5"))
    worker.start()
    result, changes = queue.get(timeout=120)
    worker.join()
    assert worker.exitcode == 0 and changes == []
    amp.reset()
    model, optimizer = initialize("O5")
    for images, targets in make_batches(3):
        take_step(F.cross_entropy(model(images), targets), optimizer)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(
            torch.from_numpy(result[name]), value, rtol=1e-2, atol=1e-3
        )  # one thread adds in another order than two


def test_two_threads_in_forward_give_what_one_after_the_other_gives():
    model, _optimizer = initialize()
    model.eval()
    batches = [make_batches(6, seed=seed) for seed in (0, 1)]
    alone = [[model(images) for images, _ in part] for part in batches]
    together = [[], []]

    def run(index):
        for images, _ in batches[index]:
            amp.refresh()  # keeps both threads busy with casting weights
            together[index].append(model(images))

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for left, right in zip(alone, together, strict=True):
        assert len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


# ---- checkpointed activations ----------------------------------------------------------------------------------------


class Nested(nn.Module):
    """A weight used inside and outside of checkpointed segments, one of them inside another."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(6, 6)
        self.inner = nn.Linear(6, 6)
        self.way = None

    def run(self, function, x):
        return function(x) if self.way is None else checkpoint(function, x, use_reentrant=self.way)

    def segment(self, x):
        return self.shared(torch.tanh(self.run(lambda h: self.inner(torch.tanh(self.shared(h))), x)))

    def forward(self, x):
        return self.run(self.segment, torch.relu(self.shared(x)))


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("level", ["O1", "O5"])
def test_checkpointing_gives_the_gradients_of_the_plain_run(level, use_reentrant):
    found = []
    for way in (None, use_reentrant):
        torch.manual_seed(0)
        model = Nested()
        model.way = way
        model, optimizer = initialize(level, model, max_loss_scale=1024.0)
        x = torch.randn(3, 6, generator=torch.Generator().manual_seed(1)).requires_grad_()
        backward(model(x).float().pow(2).sum(), optimizer)
        found.append([p.grad.clone() for p in (*amp.master_params(optimizer), x)])
        amp.reset()
    for plain, checkpointed in zip(*found, strict=True):
        if use_reentrant:  # adds up a shared weight's gradient in another order, which 16 bits show
            torch.testing.assert_close(checkpointed, plain, rtol=2e-2, atol=2e-2)
        else:
            assert torch.equal(checkpointed, plain)


# ---- torch.compile ---------------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x):
        hidden = self.norm(F.gelu(self.first(x)))
        return F.softmax(self.last(hidden @ hidden.transpose(-1, -2) @ hidden), -1)


def train_compiled(level, compiled):
    torch.manual_seed(0)
    model = Mixed()
    x = torch.randn(6, 8)
    run = model if compiled == "not" else torch.compile(model, backend="aot_eager", fullgraph=True)
    if compiled == "before":
        run(x)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)  # 1e-8 is 0 in float16
    amp.initialize(model, optimizer, opt_level=level, max_loss_scale=1024.0, verbosity=0)
    losses = []
    for _ in range(3):
        output = run(x)
        loss = output.float().pow(2).sum()
        take_step(loss, optimizer)
        losses.append(loss.item())
    amp.reset()
    return losses, output.dtype, run(x).tolist(), model(x).tolist()


@pytest.mark.parametrize(("level", "compiled"), [("O1", "before"), ("O2", "after"), ("O4", "after"), ("O5", "before")])
def test_a_compiled_model_computes_what_the_model_computes(level, compiled):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        losses, dtype, plain_again, eager_again = train_compiled(level, compiled)
        assert (losses, dtype) == train_compiled(level, "not")[:2]
    assert plain_again == eager_again  # after reset the compiled model is plain torch too


def test_methods_and_operators_compiled_before_are_not_stale():
    def product(x, w):
        return x @ w, x.matmul(w), torch.matmul(x, w)

    compiled = torch.compile(product, backend="eager", fullgraph=True)
    x = torch.ones(2, 2)

    def dtypes():
        return {value.dtype for value in compiled(x, x)}

    assert dtypes() == {torch.float32}
    for _ in range(2):
        with amp.session(opt_level="O4", device="cpu"):
            assert dtypes() == {torch.bfloat16}
        assert dtypes() == {torch.float32}


# ---- TorchScript -----------------------------------------------------------------------------------------------------


def double_product(x, w):
    return torch.mm(x, w) * 2


def test_script_reads_the_originals_and_trace_records_the_casts_of_weights():
    model, _optimizer = initialize(model=nn.Linear(3, 3))
    x = torch.randn(2, 3)
    scripted = torch.jit.script(double_product)
    assert scripted(x, torch.eye(3)).dtype is torch.float32
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(model, x)
    with torch.no_grad():
        model.weight.mul_(2)
    assert torch.equal(traced(x), model(x))
    assert amp.is_patched(torch, "mm") and torch.mm(x, torch.eye(3)).dtype is torch.bfloat16
