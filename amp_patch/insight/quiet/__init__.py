"""Finds training that loses quietly in 16 bits: no value is inf or NaN, and the model still learns less."""
