"""How a model runs: its weight formats, its kernel, whether it is exact."""

from __future__ import annotations

import platform
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from gguf.gguf_reader import ReaderTensor
from transformers import PreTrainedModel

from forerun.backends import architectures
from forerun.backends.gguf.model import model_without_weights
from forerun.backends.gguf.tokenizer import gguf_tokenizer
from forerun.backends.panels import PackedMatrix
from forerun.backends.quantised import MAX_COPIED_PARAMETERS, QuantisedForward
from forerun.backends.stored import StoredLinear, bytes_by_format
from forerun.csrc.library import library, missing, variant
from forerun.model.causal_lm import CausalLM
from forerun.zoo.formats import loaded_type, packed_bytes
from forerun.zoo.gguf_file import open_gguf


def facts_of(model: CausalLM) -> dict[str, Any]:
    """Return how a model runs.

    Returns:
        The format of most linear layers, the bytes of weights by format, the kernel,
        `CausalLM.exact`, the device, and the threads of a CPU (0 for another device).
    """
    formats = bytes_by_format(model.model)
    modules = model.model.modules()
    matrices = [module.stored for module in modules if isinstance(module, StoredLinear)]
    counts = Counter(matrix.type.name for matrix in matrices)
    main = counts.most_common(1)[0][0] if counts else next(iter(formats))
    has_packed = any(isinstance(matrix, PackedMatrix) for matrix in matrices)
    in_c = has_packed or isinstance(model.backend, QuantisedForward)
    return {
        "weights": main,
        "weight_bytes": formats,
        "kernel": f"C for {variant()}" if in_c else f"{main} products in torch",
        "exact": model.exact,
        "device": str(model.device),
        "threads": torch.get_num_threads() if model.device.type == "cpu" else 0,
    }


def kernel_of_file(path: Path) -> str:
    """Return which code would run a GGUF file's model on a CPU. Reads no weights.

    Raises:
        ValueError: loading would refuse the file.
    """
    model = model_without_weights(path)
    gguf_tokenizer(path)
    if library() is None:
        return f"torch: {missing()}"
    if open_gguf(path).is_float:
        return _kernel_of_floats(model)
    matrices = [tensor for tensor in open_gguf(path).tensors.values() if len(tensor.shape) > 1]
    if any(_is_packed(tensor) for tensor in matrices):
        return f"C for {variant()}"
    return "torch: blocks of the weight formats do not divide the sizes"


def _kernel_of_floats(model: PreTrainedModel) -> str:
    """Return which code would run a model in float32."""
    if model.num_parameters() > MAX_COPIED_PARAMETERS:
        return "torch: float32 weights of more than a billion parameters are not copied for C"
    architecture = architectures.of_model(model)
    if architecture is None or not architecture.table(model).is_in_c:
        return "torch: the library has not all that the model needs"
    return f"C for {variant()}"


def _is_packed(tensor: ReaderTensor) -> bool:
    """Return whether a matrix of a file, or experts' matrices, would be packed for C."""
    inputs, outputs, *_ = tensor.shape.tolist()
    return packed_bytes(loaded_type(tensor.tensor_type), outputs, inputs) > 0


def processor() -> str:
    """Return the name of the CPU."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
