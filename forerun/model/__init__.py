"""A Hugging Face model with its KV cache: rows, prompts, and the flat inputs of every backend.

`forward.Forward` is the protocol of backends; `eager` implements it with transformers.
"""
