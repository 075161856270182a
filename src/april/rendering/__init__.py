"""Conversion between chat messages and tokens, for environments and for the gateway.

`template_reader.py` reads a tokenizer's own chat template. `model_family.py` uses the package `renderers` for templates
that cannot be read. `choice.py` selects one of them for a tokenizer.
"""
