"""An opt-in stand-in for NVIDIA's `apex` package, made of torch's own parts."""
