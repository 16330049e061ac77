"""CUDA kernels of layers."""
