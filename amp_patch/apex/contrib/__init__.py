"""`apex.contrib`: the two parts of it that have a counterpart in torch or here, `clip_grad` and `optimizers`."""
