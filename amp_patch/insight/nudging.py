"""Weights that are off by one unit in the last place, for a noise floor."""

import torch

from ..session import Session


def nudge(session: Session, seed: int = 0) -> None:
    """Move every weight of the optimizers by one unit in the last place of its dtype, up or down.

    The seed says which go up; the random numbers of the run are not touched.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    with torch.no_grad():
        for tensor in session.trained():
            if tensor.is_floating_point():
                is_up = torch.randint(2, tensor.shape, generator=generator, dtype=torch.bool, device="cpu")
                infinity = torch.full_like(tensor, torch.inf)
                tensor.copy_(torch.nextafter(tensor, torch.where(is_up.to(tensor.device), infinity, -infinity)))
    session.refresh()
