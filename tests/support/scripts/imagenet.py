"""Image classification the way scripts of Apex's time were written: all of its flags, a prefetcher, checkpoints, one
process or several.
"""

import argparse
import os
import time

import torch
import torch.backends.cudnn as cudnn
import torch.distributed as dist
import torch.nn as nn
import torch.utils.data

try:
    from apex import amp, optimizers
    from apex.fp16_utils import *  # noqa: F403
    from apex.fp16_utils import to_python_float
    from apex.multi_tensor_apply import multi_tensor_applier
    from apex.parallel import DistributedDataParallel as DDP
except ImportError:
    raise ImportError("Please install apex to run this example.") from None


def parse():
    parser = argparse.ArgumentParser(description="Image classification")
    parser.add_argument("--workers", "-j", default=0, type=int)
    parser.add_argument("--epochs", default=2, type=int)
    parser.add_argument("--start-epoch", default=0, type=int)
    parser.add_argument("--batch-size", "-b", default=4, type=int)
    parser.add_argument("--lr", "--learning-rate", default=0.1, type=float)
    parser.add_argument("--momentum", default=0.9, type=float)
    parser.add_argument("--weight-decay", "--wd", default=1e-4, type=float)
    parser.add_argument("--print-freq", "-p", default=2, type=int)
    parser.add_argument("--resume", default="", type=str, metavar="PATH")
    parser.add_argument("--evaluate", "-e", action="store_true")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--local_rank", default=int(os.environ.get("LOCAL_RANK", 0)), type=int)
    parser.add_argument("--sync_bn", action="store_true")
    parser.add_argument("--opt-level", type=str)
    parser.add_argument("--keep-batchnorm-fp32", type=str, default=None)
    parser.add_argument("--loss-scale", type=str, default=None)
    parser.add_argument("--checkpoint", default="checkpoint.pth.tar")
    parser.add_argument("--out", default="out.pt")
    return parser.parse_args()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, stride=2, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.fc = nn.Linear(4, 5)

    def forward(self, x):
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)) + x)
        return self.fc(x.mean((2, 3)))


class Images(torch.utils.data.Dataset):
    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.images = torch.randint(0, 256, (count, 3, 8, 8), dtype=torch.uint8, generator=generator)
        self.targets = torch.randint(0, 5, (count,), generator=generator)

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return self.images[index].numpy(), int(self.targets[index])


def fast_collate(batch):
    images = torch.stack([torch.from_numpy(image) for image, _ in batch])
    return images, torch.tensor([target for _, target in batch], dtype=torch.int64)


class data_prefetcher:
    def __init__(self, loader):
        self.loader = iter(loader)
        self.stream = torch.cuda.Stream() if torch.cuda.is_available() else None
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.mean = torch.tensor([123.7, 116.3, 103.5], device=self.device).view(1, 3, 1, 1)
        self.std = torch.tensor([58.4, 57.1, 57.4], device=self.device).view(1, 3, 1, 1)
        self.preload()

    def preload(self):
        try:
            self.next_input, self.next_target = next(self.loader)
        except StopIteration:
            self.next_input = self.next_target = None
            return
        with torch.cuda.stream(self.stream):
            self.next_input = self.next_input.to(self.device, non_blocking=True)
            self.next_target = self.next_target.to(self.device, non_blocking=True)
            self.next_input = self.next_input.float().sub_(self.mean).div_(self.std)

    def next(self):
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)
        input, target = self.next_input, self.next_target
        if input is not None and self.stream is not None:
            input.record_stream(torch.cuda.current_stream())
            target.record_stream(torch.cuda.current_stream())
        if input is not None:
            self.preload()
        return input, target


class AverageMeter:
    def __init__(self):
        self.val = self.sum = self.count = self.avg = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count


def adjust_learning_rate(optimizer, epoch, step, len_epoch):
    lr = args.lr * 0.1**epoch
    if epoch < 1:
        lr = lr * float(1 + step + epoch * len_epoch) / len_epoch
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr


def accuracy(output, target, topk=(1,)):
    maxk = max(topk)
    _, pred = output.topk(maxk, 1, True, True)
    correct = pred.t().eq(target.view(1, -1).expand_as(pred.t()))
    return [correct[:k].reshape(-1).float().sum(0, keepdim=True).mul_(100.0 / target.size(0)) for k in topk]


def reduce_tensor(tensor):
    rt = tensor.clone()
    dist.all_reduce(rt, op=dist.ReduceOp.SUM)
    rt /= args.world_size
    return rt


def main():
    global args
    args = parse()
    print(f"opt_level = {args.opt_level}")
    print(f"keep_batchnorm_fp32 = {args.keep_batchnorm_fp32}", type(args.keep_batchnorm_fp32))
    print(f"loss_scale = {args.loss_scale}", type(args.loss_scale))
    cudnn.benchmark = not args.deterministic
    torch.manual_seed(args.local_rank)

    args.distributed = int(os.environ.get("WORLD_SIZE", 1)) > 1
    args.world_size = 1
    if args.distributed:
        if torch.cuda.is_available():
            torch.cuda.set_device(args.local_rank)
        dist.init_process_group(backend="nccl" if torch.cuda.is_available() else "gloo", init_method="env://")
        args.world_size = dist.get_world_size()
    assert multi_tensor_applier.available and optimizers.FusedSGD is not None

    model = Net()
    if args.sync_bn:
        import apex

        print("using apex synced BN")
        model = apex.parallel.convert_syncbn_model(model)
    if torch.cuda.is_available():
        model = model.cuda()
    args.lr = args.lr * float(args.batch_size * args.world_size) / 4.0
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=args.momentum, weight_decay=args.weight_decay)
    model, optimizer = amp.initialize(
        model,
        optimizer,
        opt_level=args.opt_level,
        keep_batchnorm_fp32=args.keep_batchnorm_fp32,
        loss_scale=args.loss_scale,
    )
    if args.distributed:
        model = DDP(model, delay_allreduce=True)
    criterion = nn.CrossEntropyLoss()
    if torch.cuda.is_available():
        criterion = criterion.cuda()

    best_prec1 = 0
    if args.resume:
        if os.path.isfile(args.resume):
            print(f"=> loading checkpoint '{args.resume}'")
            checkpoint = torch.load(args.resume, map_location="cuda" if torch.cuda.is_available() else "cpu")
            args.start_epoch = checkpoint["epoch"]
            best_prec1 = checkpoint["best_prec1"]
            model.load_state_dict(checkpoint["state_dict"])
            optimizer.load_state_dict(checkpoint["optimizer"])
            amp.load_state_dict(checkpoint["amp"])
            print(f"=> loaded checkpoint '{args.resume}' (epoch {checkpoint['epoch']})")
        else:
            print(f"=> no checkpoint found at '{args.resume}'")

    train_dataset, val_dataset = Images(16, 0), Images(8, 1)
    train_sampler = torch.utils.data.distributed.DistributedSampler(train_dataset) if args.distributed else None
    val_loader = torch.utils.data.DataLoader(
        val_dataset, batch_size=args.batch_size, num_workers=args.workers, collate_fn=fast_collate
    )
    if args.evaluate:
        validate(val_loader, model, criterion)
        return

    history = []
    for epoch in range(args.start_epoch, args.epochs):
        if args.distributed:
            train_sampler.set_epoch(epoch)
        train_loader = torch.utils.data.DataLoader(
            train_dataset,
            batch_size=args.batch_size,
            shuffle=(train_sampler is None),
            num_workers=args.workers,
            sampler=train_sampler,
            collate_fn=fast_collate,
            generator=torch.Generator().manual_seed(epoch),
        )
        history += train(train_loader, model, criterion, optimizer, epoch)
        prec1 = validate(val_loader, model, criterion)
        if args.local_rank == 0:
            best_prec1 = max(prec1, best_prec1)
            torch.save(
                {
                    "epoch": epoch + 1,
                    "state_dict": model.state_dict(),
                    "best_prec1": best_prec1,
                    "optimizer": optimizer.state_dict(),
                    "amp": amp.state_dict(),
                },
                args.checkpoint,
            )
    torch.save({"losses": history, "weights": model.state_dict(), "prec1": prec1}, f"{args.out}.{args.local_rank}")


def train(train_loader, model, criterion, optimizer, epoch):
    batch_time, losses, top1, top5 = AverageMeter(), AverageMeter(), AverageMeter(), AverageMeter()
    history = []
    model.train()
    end = time.time()
    prefetcher = data_prefetcher(train_loader)
    input, target = prefetcher.next()
    i = 0
    while input is not None:
        i += 1
        adjust_learning_rate(optimizer, epoch, i, len(train_loader))
        output = model(input)
        loss = criterion(output, target)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        history.append(to_python_float(loss.data))
        if i % args.print_freq == 0:
            prec1, prec5 = accuracy(output.data, target, topk=(1, 5))
            reduced_loss = loss.data
            if args.distributed:
                reduced_loss, prec1, prec5 = reduce_tensor(loss.data), reduce_tensor(prec1), reduce_tensor(prec5)
            losses.update(to_python_float(reduced_loss), input.size(0))
            top1.update(to_python_float(prec1), input.size(0))
            top5.update(to_python_float(prec5), input.size(0))
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            batch_time.update((time.time() - end) / args.print_freq)
            end = time.time()
            if args.local_rank == 0:
                print(
                    f"Epoch: [{epoch}][{i}/{len(train_loader)}]\tLoss {losses.val:.10f} ({losses.avg:.4f})\tPrec@1"
                    f" {top1.val:.3f}"
                )
        input, target = prefetcher.next()
    return history


def validate(val_loader, model, criterion):
    top1 = AverageMeter()
    model.eval()
    prefetcher = data_prefetcher(val_loader)
    input, target = prefetcher.next()
    while input is not None:
        with torch.no_grad():
            output = model(input)
            criterion(output, target)
        (prec1,) = accuracy(output.data, target)
        top1.update(to_python_float(reduce_tensor(prec1) if args.distributed else prec1), input.size(0))
        input, target = prefetcher.next()
    print(f" * Prec@1 {top1.avg:.3f}")
    return top1.avg


if __name__ == "__main__":
    main()
