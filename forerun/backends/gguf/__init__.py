"""Models from GGUF files, the format of llama.cpp, with the file's own weight formats."""

from forerun.backends.gguf.config import gguf_config
from forerun.backends.gguf.model import load_gguf
from forerun.backends.gguf.tokenizer import gguf_tokenizer

__all__ = ["gguf_config", "gguf_tokenizer", "load_gguf"]
