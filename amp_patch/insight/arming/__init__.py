"""Watches the steps of a training. If a step goes wrong, repeats it under a tracer, to find the cause."""
