"""`python -m amp_patch.apex.parallel.multiproc script.py ...`: torchrun with a process for each local GPU.

Apex's launcher added `--world-size` and `--rank` to the script's arguments. torchrun sets the environment variables
WORLD_SIZE, RANK and LOCAL_RANK instead.
"""

import sys
from collections.abc import Sequence

import torch
from torch.distributed import run


def main(arguments: Sequence[str]) -> None:
    """Run `torchrun --standalone --nproc-per-node=N *arguments`, with N the number of GPUs, or 1 without any."""
    run.main(["--standalone", f"--nproc-per-node={max(torch.cuda.device_count(), 1)}", *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
