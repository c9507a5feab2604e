"""Models from GGUF files, the format of llama.cpp, in the weight formats of the file."""
