"""Stands in for flash-attn, which is built for CUDA: SkyRL imports it, and calls it only with its own attention."""
