"""Which ops or modules must stay in float32 for gradients that are right within a tolerance, from a few short runs."""
