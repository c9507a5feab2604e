"""Models out of GGUF files, the format of llama.cpp, with their weights in the bits that the file has them in."""

from forerun.backends.gguf.config import gguf_config
from forerun.backends.gguf.model import load_gguf
from forerun.backends.gguf.tokenizer import gguf_tokenizer

__all__ = ["gguf_config", "gguf_tokenizer", "load_gguf"]
