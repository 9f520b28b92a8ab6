"""Tiny models of transformers, and data that they can learn, for the tests with its Trainers."""

import torch
import transformers

import amp_patch as amp


def make_model(name):
    torch.manual_seed(0)
    if name == "bert":
        config = transformers.BertConfig(
            vocab_size=64,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=32,
            num_labels=3,
        )
        return transformers.BertForSequenceClassification(config)
    if name == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=32, bos_token_id=0, eos_token_id=0
        )
        return transformers.GPT2LMHeadModel(config)
    config = transformers.T5Config(
        vocab_size=64,
        d_model=32,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


class Tokens(torch.utils.data.Dataset):
    def __init__(self, name):
        self.name = name

    def __len__(self):
        return 48

    def __getitem__(self, index):
        ids = torch.randint(1, 64, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": int(ids[0]) % 3 if self.name == "bert" else ids.clone()}


def train(trainer_class, name, folder, resume_from=None, trainer_options=None, **arguments):
    """Six steps, saved after three; returns the weights, the evaluation's loss, and the logs of the steps."""
    options = {
        "output_dir": str(folder),
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "save_steps": 3,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "learning_rate": 1e-3,
        "seed": 1,
        "disable_tqdm": True,
        **arguments,
    }
    trainer = trainer_class(
        model=make_model(name),
        args=transformers.TrainingArguments(**options),
        train_dataset=Tokens(name),
        eval_dataset=Tokens(name),
        **(trainer_options or {}),
    )
    trainer.train(resume_from_checkpoint=resume_from)
    loss = trainer.evaluate()["eval_loss"]
    weights = [value.detach().clone() for value in trainer.model.state_dict().values()]
    trainer.save_model(f"{folder}/final")
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    kind = type(trainer.model)
    del trainer
    amp.reset()
    return weights, loss, logs, kind
