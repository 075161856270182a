"""Stands in for flash-attn, which needs CUDA: OpenRLHF imports these names, and nothing here calls them."""
