"""Finds quiet losses: values that 16 bits round away, so that the model learns less, although none is inf or NaN."""
