"""Models from GGUF files, the format of llama.cpp, with the file's own weight formats."""
