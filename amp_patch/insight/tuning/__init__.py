"""Finds the ops or modules that must stay in float32 to keep gradients within a tolerance, from a few short runs."""
