"""A Hugging Face model with its KV cache: rows, prompts, and the flat inputs of every backend.

`Forward` is the protocol of backends; `eager` is transformers' own.
"""
