"""QLoRA trains with the gradients of autocast: bitsandbytes' weights of 4 bits (NF4, quantized twice) and optimizers of
8 bits, with peft, unmodified.

Guards: casting/tensor_cast, training/groups.
"""

import pytest
import torch
from training import backward

import amp_patch as amp

bitsandbytes = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: make test-clients")
pytest.importorskip("peft", reason="needs peft: make test-clients")
transformers = pytest.importorskip("transformers", reason="needs transformers: make test-clients")
pytest.importorskip("accelerate", reason="needs accelerate: make test-clients")

from lora_samples import LEVELS, adapters_of, add_lora, loss_of, make_base, make_optimizer, train  # noqa: E402

OPTIMIZERS = {"AdamW": torch.optim.AdamW} | {
    name: getattr(bitsandbytes.optim, name) for name in ("AdamW8bit", "PagedAdamW8bit")
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    make_base().save_pretrained(folder)
    return folder


@pytest.fixture
def make(saved):
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )

    def make():
        base = transformers.AutoModelForCausalLM.from_pretrained(
            saved, quantization_config=config, dtype=torch.float32, device_map="cpu"
        )
        return add_lora(base).train()  # a run in evaluation would pack the weights anew on some CPUs

    return make


def quantised_of(model):
    """What the weights of 4 bits are made of."""
    found = {}
    for name, weight in model.named_parameters():
        if isinstance(weight, bitsandbytes.nn.Params4bit):
            state = weight.quant_state
            found |= {f"{name} {part}": value.clone() for part, value in state.as_dict(packed=True).items()}
            found[name] = weight.data.clone()
    return found


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("level", LEVELS)
def test_adapters_train_on_quantised_weights(level, kind, make):
    def start(level):
        model = make()
        options = {} if kind == "AdamW" else {"min_8bit_size": 1}
        optimizer = make_optimizer(model, OPTIMIZERS[kind], **options)
        before = quantised_of(model)
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, **LEVELS[level])
        return model, optimizer, before

    model, optimizer, before = start(level)
    losses = train(model, optimizer)
    after = quantised_of(model)
    assert sum(name.endswith("nested_absmax") for name in before) == 14 and before.keys() == after.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert losses[-1] < losses[0]
    if kind != "AdamW":
        assert all(state["state1"].dtype is state["state2"].dtype is torch.uint8 for state in optimizer.state.values())
    amp.reset()
    plain, optimizer, _ = start("O0")
    nearness = 0.05 if level == "O3" else 0.01  # without masters, Adam's squares of gradients are float16
    assert losses == pytest.approx(train(plain, optimizer), rel=nearness)


@pytest.mark.parametrize(("level", "low"), [("O1", torch.float16), ("O4", torch.bfloat16)])
def test_gradients_are_those_of_autocast(level, low, make):
    model, scale = make(), 2.0**8
    with torch.autocast("cpu", low):
        loss = loss_of(model)
    (loss * scale).backward()
    expected = [adapter.grad / scale for adapter in adapters_of(model).values()]
    model = make()
    amp.initialize(
        model, optimizer := make_optimizer(model), opt_level=level, loss_scale=scale, compute="native", verbosity=0
    )
    ours = loss_of(model)
    backward(ours, optimizer)
    assert ours.item() == loss.item()
    assert all(map(torch.equal, [adapter.grad for adapter in adapters_of(model).values()], expected))
