"""The training loop of the tests that do not write one of their own."""

import torch.nn.functional as F

import amp_patch as amp


def backward(loss, optimizer, **options):
    """Go backward from a loss as scripts do, in a block of its own."""
    with amp.scale_loss(loss, optimizer, **options) as scaled_loss:
        scaled_loss.backward()


def take_step(loss, optimizer, **options):
    """Step on the gradients of a loss alone."""
    optimizer.zero_grad()
    backward(loss, optimizer, **options)
    optimizer.step()


def train(model, optimizer, batches, scheduler=None):
    """Train by amp, one step for each batch, and return the losses."""
    losses = []
    for images, targets in batches:
        loss = F.cross_entropy(model(images), targets)
        take_step(loss, optimizer)
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses
