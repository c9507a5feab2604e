"""A Hugging Face model with its KV cache: one layout of a batch, one forward."""
