"""Worker processes see plain torch or train by themselves, and TorchScript works beside the patches.

Guards: casting/mode, casting/op_patches, session/torch_patches.
"""

import warnings

import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from reference import make_batches, make_model
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch_state import find_changes
from training import take_step

import amp_patch as amp


def initialize(level="O4", model=None, **options):
    model = make_model() if model is None else model
    return amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.05), opt_level=level, verbosity=0, **options)


# ---- workers ---------------------------------------------------------------------------------------------------------


class Products(Dataset):
    """Items that a patched matmul would make 16-bit."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.matmul(torch.full((2, 2), index + 0.1), torch.eye(2)), str(
            torch.matmul(torch.ones(1, 1), torch.ones(1, 1)).dtype
        )


def test_data_loader_workers_see_plain_torch():
    expected = torch.stack([Products()[index][0] for index in range(4)])
    _model, _optimizer = initialize()
    items, dtypes = [], set()
    for batch, names in DataLoader(Products(), batch_size=2, num_workers=1, multiprocessing_context="fork"):
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


def test_initialize_works_in_a_worker_process():
    context = mp.get_context("fork")
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
