"""The training loop of the tests that do not write one of their own."""

import torch.nn.functional as F

import amp_patch as amp


def train(model, optimizer, batches, scheduler=None):
    """Train by amp, one step for each batch, and return the losses."""
    losses = []
    for images, targets in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), targets)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses
