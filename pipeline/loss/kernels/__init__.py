"""Triton kernels of the fused output head."""
