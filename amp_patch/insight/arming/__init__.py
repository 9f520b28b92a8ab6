"""Repeats a step that goes wrong under a tracer, and costs almost nothing before."""
