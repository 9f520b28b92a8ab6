"""QLoRA (Dettmers et al. 2023, arXiv:2305.14314): a language model in 4 bits, fine-tuned by adapters at level O4.

A small byte-level Llama learns the English of Python's `help()` in float32. Quantised by bitsandbytes (NF4, double
quantisation) and frozen, it then learns Python source by LoRA adapters of peft, with a paged 8-bit AdamW. The layers
that are not quantised stay float32: amp_patch refuses a base in 16 bits. The run fails if a bit of the base changes,
or if the gradients are not those under torch.autocast: bit by bit with `compute="native"`, torch's own 16-bit kernels;
nearly without it, since a CPU may then compute short attention, or every product, in float32 from rounded operands.
"""

import argparse
import inspect
import sys
import typing
from collections.abc import Iterable, Iterator, Sequence
from pydoc_data.topics import topics

import common
import torch
from bitsandbytes.nn import Linear4bit
from bitsandbytes.optim import PagedAdamW8bit
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

import amp_patch as amp

LENGTH, BATCH_SIZE = 64, 8
PRETRAINING = 2  # steps in float32 for each step of fine-tuning
NEAR = 0.02  # of the length of all gradients: bfloat16 rounds by up to 2**-8, here in one product after another
QUANTISED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def read_windows(text: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return windows `[n, 65]` of ASCII codes to train on, and 128 others to test on."""
    codes = torch.tensor([min(ord(character), 127) for character in text], device=device)
    windows = codes[: len(codes) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
    is_test = torch.arange(len(windows), device=device) % 10 == 0
    return windows[~is_test], windows[is_test][:128]


def compute_loss(model: nn.Module, windows: Tensor) -> Tensor:
    """Return the mean loss in nats of the next character."""
    return functional.cross_entropy(model(windows[:, :-1]).logits.float().flatten(0, 1), windows[:, 1:].flatten())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, windows: Tensor, steps: int) -> None:
    for rows in common.draw_batches(len(windows), BATCH_SIZE, steps, 0, windows.device):
        optimizer.zero_grad()
        loss = compute_loss(model, windows[rows])
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()


def quantise(model: nn.Module) -> nn.Module:
    """Quantise the blocks' linear layers to 4 bits, freeze all, and return the model with adapters in float32."""
    for name, linear in list(model.named_modules()):
        if name.endswith(QUANTISED):
            sizes = (linear.in_features, linear.out_features)
            low = Linear4bit(*sizes, bias=False, compute_dtype=torch.float32, quant_type="nf4")
            low.load_state_dict(linear.state_dict())
            model.set_submodule(name, low.to(linear.weight.device))  # quantised by the move
    model.is_loaded_in_4bit = True  # peft asks for it
    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=list(QUANTISED)))


def base_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Yield every tensor that is not an adapter, and those that 4-bit weights are quantised by."""
    for parameter in model.parameters():
        if not parameter.requires_grad:
            yield parameter.detach()
            if hasattr(parameter, "quant_state"):
                packed = parameter.quant_state.as_dict(packed=True)
                yield from (value for value in packed.values() if isinstance(value, Tensor))


def find_gradients(adapters: Sequence[nn.Parameter], loss: Tensor) -> list[Tensor]:
    """Return the gradient of each adapter from this loss alone."""
    return list(torch.autograd.grad(loss, adapters))


def find_distance(ones: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """Return the length of the difference of all gradients, as a part of the length of `others`."""
    difference = [one - other for one, other in zip(ones, others, strict=True)]
    return (nn.utils.get_total_norm(difference) / nn.utils.get_total_norm(others)).item()


def are_equal(ones: Iterable[Tensor], others: Iterable[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


def fine_tune(steps: int, device: torch.device) -> tuple[dict[str, list[float]], dict[str, int], dict[str, bool]]:
    """Train, quantise and fine-tune; return losses on unseen help texts and source, bytes, and what must hold."""
    english, english_test = read_windows("\n".join(topics[name] for name in sorted(topics)), device)
    sources = (inspect.getsource(module) for module in (argparse, inspect, typing))
    python, python_test = read_windows("\n".join(sources), device)
    losses = {}

    def measure(stage: str) -> None:
        with torch.no_grad():
            losses[stage] = [compute_loss(model, windows).item() for windows in (english_test, python_test)]

    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=128, use_cache=False, **shape)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O0", verbosity=0)
    train(model, optimizer, english, PRETRAINING * steps)
    amp.reset()
    measure("float32")
    sizes = {"float32": sum(weight.nbytes for weight in model.parameters())}

    model = quantise(model)
    measure("4 bits")
    before = [tensor.clone() for tensor in base_tensors(model)]
    sizes["4 bits"] = sum(tensor.nbytes for tensor in before)
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    sizes["adapters"] = sum(adapter.nbytes for adapter in adapters)
    optimizer = PagedAdamW8bit(adapters, lr=2e-3, min_8bit_size=256)  # by default, small states are float32
    model, optimizer = amp.initialize(model, optimizer, opt_level="O4", verbosity=0)
    train(model, optimizer, python, steps)
    by_amp = find_gradients(adapters, compute_loss(model, python_test[:BATCH_SIZE]))
    amp.reset()
    model = amp.initialize(model, opt_level="O4", compute="native", verbosity=0)
    by_native = find_gradients(adapters, compute_loss(model, python_test[:BATCH_SIZE]))
    amp.reset()
    with torch.autocast(device.type, torch.bfloat16):
        loss = compute_loss(model, python_test[:BATCH_SIZE])
    by_autocast = find_gradients(adapters, loss)
    measure("4 bits, tuned")
    states = [optimizer.state[adapter]["state1"] for adapter in adapters]
    checks = {
        f"all {len(before)} tensors of the base are what they were, bit by bit": are_equal(before, base_tensors(model)),
        f"all {len(adapters)} gradients differ by less than {NEAR:.0%} from those under torch.autocast": (
            find_distance(by_amp, by_autocast) < NEAR
        ),
        f'with compute="native", all {len(adapters)} are those under torch.autocast, bit by bit': (
            are_equal(by_native, by_autocast)
        ),
        "the optimizer keeps its state in 8 bits": all(state.dtype is torch.uint8 for state in states),
    }
    return losses, sizes, checks


def main(argv: Sequence[str] | None = None) -> int:
    options = common.parse_options(__doc__, steps=120, argv=argv)
    torch.set_num_threads(1)  # more threads gain nothing on a network of this size
    common.shorten(options, lambda steps: fine_tune(steps, options.device))
    losses, sizes, checks = fine_tune(options.steps, options.device)
    table = common.Table("loss on unseen".ljust(16), "help texts", "Python source")
    for stage, (english, python) in losses.items():
        table.print_row(stage, f"{english:.4f}", f"{python:.4f}")
    print("\nBytes of the weights: " + ", ".join(f"{size:,} {name}" for name, size in sizes.items()) + "\n")
    if options.plot:
        figure, (panel,) = common.make_figure(1)
        bars = {text: {stage: pair[i] for stage, pair in losses.items()} for i, text in enumerate(("help", "source"))}
        common.draw_bars(panel, "Loss on unseen text; tuned on Python source", bars, "%.2f")
        figure.savefig(options.plot)
        print(f"Losses: {options.plot}\n")
    return common.report_checks(checks)


if __name__ == "__main__":
    sys.exit(main())
