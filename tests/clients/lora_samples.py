"""A tiny Llama, and the adapters that peft puts on it, for the tests with frozen weights."""

import peft
import torch
import transformers
from training import take_step

LEVELS = {"O0": {}, "O1": {"loss_scale": 2.0**8}, "O2": {"loss_scale": 2.0**8}, "O3": {}, "O4": {}, "O5": {}}
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"], "init_lora_weights": False}
IDS = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(3))


def make_base():
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 32}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))


def add_lora(base):
    torch.manual_seed(1)
    return peft.get_peft_model(base, peft.LoraConfig(**LORA))


def adapters_of(model):
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def base_of(model):
    return {name: parameter for name, parameter in model.named_parameters() if not parameter.requires_grad}


def loss_of(model):
    return model(input_ids=IDS, labels=IDS).loss


def make_optimizer(model, kind=torch.optim.AdamW, **options):
    return kind(list(adapters_of(model).values()), lr=5e-3, eps=1e-6, **options)


def train(model, optimizer, steps=4):
    losses = []
    for _ in range(steps):
        loss = loss_of(model)
        take_step(loss, optimizer)
        losses.append(loss.item())
    return losses
