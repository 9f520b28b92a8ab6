"""If a step goes wrong, repeats it under a tracer. Until then, it costs almost nothing."""
