"""CUDA kernels of our own, for what neither cupy nor cuDNN does deterministically and in one pass."""
