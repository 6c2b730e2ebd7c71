"""What is probably not meant in a net, its solver, or for its data: ``python -m gpu.lint`` (docs/nets.md)."""
