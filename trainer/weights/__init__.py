"""Canonical Hugging Face names for Megatron's weights, both directions, bit for bit."""

from trainer.weights.export import export_folder
from trainer.weights.files import WEIGHTS_FILE, read_safetensors
from trainer.weights.names import TensorPart, tensor_parts
from trainer.weights.placement import Placement, place, tensors_of
from trainer.weights.shards import write_safetensors
from trainer.weights.transfer import assemble, export_weights, import_weights, parts_of

__all__ = [
    "WEIGHTS_FILE",
    "Placement",
    "TensorPart",
    "assemble",
    "export_folder",
    "export_weights",
    "import_weights",
    "parts_of",
    "place",
    "read_safetensors",
    "tensor_parts",
    "tensors_of",
    "write_safetensors",
]
