"""A Hugging Face model with its KV cache: rows, prompts, the flat inputs that every backend takes.

`Forward` is the protocol of backends; `eager` is transformers' own."""
