"""Pretraining of a small transformer: fused optimizers, accumulation, clipping, a loss scale set by hand, checkpoints
with the master parameters.
"""

import argparse
import math

import amp_C
import torch
import torch.nn as nn
import torch.nn.functional as F
from apex import amp
from apex.amp import _amp_state
from apex.multi_tensor_apply import multi_tensor_applier
from apex.normalization import FusedLayerNorm
from apex.optimizers import FusedAdam, FusedLAMB

VOCABULARY, LENGTH, WIDTH, HEADS = 20, 6, 8, 2


class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, hidden, mask):
        batch = hidden.size(0)
        query, key, value = (
            layer(hidden).view(batch, LENGTH, HEADS, WIDTH // HEADS).permute(0, 2, 1, 3)
            for layer in (self.query, self.key, self.value)
        )
        scores = torch.matmul(query, key.transpose(-1, -2)) / math.sqrt(WIDTH // HEADS)
        probs = F.softmax(scores + mask, dim=-1)
        context = torch.matmul(probs, value).permute(0, 2, 1, 3).reshape(batch, LENGTH, WIDTH)
        return self.output(context)


class Bert(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.norm = FusedLayerNorm(WIDTH, eps=1e-12)
        self.attention = SelfAttention()
        self.attention_norm = FusedLayerNorm(WIDTH, eps=1e-12)
        self.intermediate = nn.Linear(WIDTH, 2 * WIDTH)
        self.output = nn.Linear(2 * WIDTH, WIDTH)
        self.output_norm = FusedLayerNorm(WIDTH, eps=1e-12)
        self.decoder = nn.Linear(WIDTH, VOCABULARY)
        self.decoder.weight = self.words.weight

    def forward(self, input_ids, attention_mask):
        mask = (1.0 - attention_mask.unsqueeze(1).unsqueeze(2).to(dtype=next(self.parameters()).dtype)) * -10000.0
        hidden = self.norm(self.words(input_ids) + self.positions.weight)
        hidden = self.attention_norm(hidden + self.attention(hidden, mask))
        hidden = self.output_norm(hidden + self.output(F.gelu(self.intermediate(hidden))))
        return self.decoder(hidden)


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--optimizer", default="lamb", choices=["lamb", "adam"])
    parser.add_argument("--learning_rate", default=1e-2, type=float)
    parser.add_argument("--gradient_accumulation_steps", default=2, type=int)
    parser.add_argument("--max_steps", default=6, type=int)
    parser.add_argument("--fp16", action="store_true")
    parser.add_argument("--opt_level", default="O2")
    parser.add_argument("--loss_scale", type=float, default=0.0, help="0 is dynamic")
    parser.add_argument("--init_loss_scale", type=int, default=2**19)
    parser.add_argument("--resume_from_checkpoint", default="")
    parser.add_argument("--checkpoint", default="ckpt.pt")
    parser.add_argument("--save_at", type=int, default=3)
    parser.add_argument("--out", default="out.pt")
    return parser.parse_args()


def prepare_model_and_optimizer(args, device):
    torch.manual_seed(0)
    model = Bert().to(device)
    checkpoint = torch.load(args.resume_from_checkpoint, map_location="cpu") if args.resume_from_checkpoint else None
    if checkpoint is not None:
        model.load_state_dict(checkpoint["model"], strict=False)
    no_decay = ["bias", "norm"]
    groups = [
        {
            "params": [p for n, p in model.named_parameters() if not any(nd in n for nd in no_decay)],
            "weight_decay": 0.01,
        },
        {"params": [p for n, p in model.named_parameters() if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
    ]
    if args.optimizer == "lamb":
        optimizer = FusedLAMB(groups, lr=args.learning_rate)
    else:
        optimizer = FusedAdam(groups, lr=args.learning_rate, bias_correction=False)
    if args.fp16:
        if args.loss_scale == 0:
            model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level, loss_scale="dynamic")
            amp._amp_state.loss_scalers[0]._loss_scale = args.init_loss_scale
        else:
            model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level, loss_scale=args.loss_scale)
    if checkpoint is not None:
        optimizer.load_state_dict(checkpoint["optimizer"])
        if args.fp16:
            amp.load_state_dict(checkpoint["amp"])
            optimizer._lazy_init_maybe_master_weights()
            optimizer._amp_stash.lazy_init_called = True
            optimizer.load_state_dict(checkpoint["optimizer"])
            for param, saved_param in zip(amp.master_params(optimizer), checkpoint["master params"], strict=True):
                param.data.copy_(saved_param.data)
    return model, optimizer, 0 if checkpoint is None else checkpoint["step"]


def take_optimizer_step(args, optimizer, model, overflow_buf):
    parameters = list(amp.master_params(optimizer))
    grads = [p.grad for p in parameters if p.grad is not None]
    norm, _ = multi_tensor_applier(amp_C.multi_tensor_l2norm, overflow_buf, [grads], False)
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    for param in model.parameters():
        param.grad = None
    return norm.item()


def main():
    args = parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, optimizer, start = prepare_model_and_optimizer(args, device)
    overflow_buf = torch.zeros(1, dtype=torch.int, device=device)
    history, average_loss = [], 0.0
    model.train()
    for step in range(start, args.max_steps):
        for micro in range(args.gradient_accumulation_steps):
            generator = torch.Generator().manual_seed(100 * step + micro)
            labels = torch.randint(1, VOCABULARY, (2, LENGTH), generator=generator).to(device)
            input_ids = labels.clone()
            input_ids[:, ::2] = 0
            attention_mask = torch.ones_like(labels)
            attention_mask[:, -1] = 0
            logits = model(input_ids, attention_mask)
            loss = F.cross_entropy(logits.view(-1, VOCABULARY), labels.view(-1)) / args.gradient_accumulation_steps
            if args.fp16:
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
            else:
                loss.backward()
            average_loss += loss.item()
        norm = take_optimizer_step(args, optimizer, model, overflow_buf)
        scale = _amp_state.loss_scalers[0].loss_scale() if args.fp16 else 1.0
        print(f"step {step} loss {average_loss:.6f} norm {norm:.4f} loss scale {scale}")
        history.append((average_loss, norm, scale))
        average_loss = 0.0
        if step + 1 == args.save_at:
            torch.save(
                {
                    "model": getattr(model, "module", model).state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "master params": list(amp.master_params(optimizer)),
                    "amp": amp.state_dict() if args.fp16 else {},
                    "step": step + 1,
                },
                args.checkpoint,
            )
    torch.save({"losses": history, "weights": model.state_dict()}, args.out)


if __name__ == "__main__":
    main()
