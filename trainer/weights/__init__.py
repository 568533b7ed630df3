"""Canonical Hugging Face names for Megatron's weights, both directions, bit for bit."""

from trainer.weights.files import WEIGHTS_FILE, read_safetensors, write_safetensors
from trainer.weights.names import TensorPart, tensor_parts
from trainer.weights.transfer import export_weights, import_weights, parts_of, tensors_of

__all__ = [
    "WEIGHTS_FILE",
    "TensorPart",
    "export_weights",
    "import_weights",
    "parts_of",
    "read_safetensors",
    "tensor_parts",
    "tensors_of",
    "write_safetensors",
]
