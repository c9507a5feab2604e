"""Qwen2 and Qwen2.5, whose queries, keys and values have biases."""

from __future__ import annotations

from forerun.backends.architectures.architecture import Architecture, llama_table

QWEN2 = Architecture(name="qwen2", classes=("Qwen2ForCausalLM",), table=llama_table)
