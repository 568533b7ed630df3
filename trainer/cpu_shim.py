"""Lets Megatron-Core run without CUDA, and without TransformerEngine.

With both present, `install` changes nothing.

Megatron-Core names CUDA directly in places that have nothing to do with kernels: it asks for the
current device, makes one-element tensors with `device="cuda"`, waits for streams. `install` gives
*Megatron's own modules* another `torch`: the same module, but for the names below. Nothing is
changed in torch itself, so other libraries of the process (transformers, for one) see what they
always saw, and pay nothing.

The exceptions are two methods. `Tensor.type()`, which some checks of Megatron's optimizer compare
with `'torch.cuda.FloatTensor'`, is replaced only inside `optimizer_on_cpu()`; `Tensor.cuda()`,
which a model calls on an embedding that two pipeline stages share, only inside `model_on_cpu()`.

Checked with the versions of Megatron-Core in `CHECKED_VERSIONS`.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = ["CHECKED_VERSIONS", "install", "model_on_cpu", "optimizer_on_cpu"]

CHECKED_VERSIONS = ("0.16.1", "0.19.2")
"""Versions of megatron-core whose tests passed through this shim."""

_CPU = torch.device("cpu")

_MEGATRON_MODULES = (
    "megatron.core",
    "megatron.core.distributed",
    "megatron.core.models.gpt",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer",
    "megatron.core.optimizer_param_scheduler",
    "megatron.core.pipeline_parallel",
    "megatron.core.tensor_parallel.random",
    "megatron.core.transformer.dot_product_attention",
    "megatron.core.transformer.moe.router_replay",
)


class _NoStream:
    """Stands for streams and events: on a CPU everything has happened when the call returns."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        """Take and forget what a CUDA stream or event would be made with."""

    def record_event(self, *args: object) -> _NoStream:
        """The all-to-all dispatcher waits for what it gives."""
        return _NoStream()

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


class _CpuCuda(types.ModuleType):
    """`torch.cuda` as Megatron's modules see it: the few names they call mean the CPU."""

    Stream = _NoStream
    Event = _NoStream

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    def current_device(self) -> torch.device:
        """Rotary embeddings, router weights, gradient buffers, the global memory buffer."""
        return _CPU

    def current_stream(self, *args: object) -> _NoStream:
        """Gradient buffers and the token dispatcher wait for it."""
        return _NoStream()

    default_stream = current_stream

    def stream(self, stream: object) -> contextlib.AbstractContextManager[None]:
        """Communication on a side stream: here in order, on the only one."""
        return contextlib.nullcontext()

    def synchronize(self, *args: object) -> None:
        """Nothing to wait for."""

    def set_device(self, *args: object) -> None:
        """There is one device."""

    def manual_seed(self, seed: int) -> None:
        """Deliberately nothing: `trainer.parallel.initialize` seeds the one generator itself."""


def _on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
    """`make`, with `device="cuda"` meaning the CPU and memory not pinned."""

    def made(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = _CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return make(*args, **kwargs)

    made.__name__ = getattr(make, "__name__", "made")
    return made


class _CpuTorch(types.ModuleType):
    """`torch` as Megatron's modules see it."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.cuda = _CpuCuda("torch.cuda")
        # optimizer.py, clip_grads.py, schedules.py, moe_utils.py: counters and flags on "cuda".
        for name in ("tensor", "zeros", "empty", "ones", "full", "empty_like", "zeros_like"):
            setattr(self, name, _on_cpu(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


_cpu_torch = _CpuTorch()


def install() -> None:
    """Import Megatron-Core and, where there is no CUDA, make it run on the CPU. Idempotent.

    Call it again after importing further modules of Megatron. `trainer.megatron` does it, and is
    where everything else takes Megatron's names from.

    Raises: whatever importing Megatron-Core raises (ImportError where it is not installed).
    """
    if torch.cuda.is_available():
        _import_megatron()
        _complete_without_transformer_engine()
        return
    _without_triton_kernels()
    with _no_compilation():
        _import_megatron()
    _complete_without_transformer_engine()
    _complete_token_dispatcher()
    _one_generator()
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.") and getattr(module, "torch", None) is torch:
            module.torch = _cpu_torch  # type: ignore[attr-defined]  # a module's global


def _import_megatron() -> None:
    with warnings.catch_warnings():
        # It warns at import that TransformerEngine and Apex are absent, and about its own old
        # names.
        warnings.simplefilter("ignore")
        for name in _MEGATRON_MODULES:
            importlib.import_module(name)


@contextlib.contextmanager
def _no_compilation() -> Iterator[None]:
    """While Megatron is imported, `torch.compile` returns the function as it is.

    megatron/core/jit.py compiles small functions with it. On a CPU that needs a C++ compiler, costs
    seconds at the first call, and rounds differently from the code that is written there.
    """
    compile_ = torch.compile

    def as_it_is(function: Any = None, **options: Any) -> Any:
        return (lambda f: f) if function is None else function

    torch.compile = as_it_is  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compile_


def _without_triton_kernels() -> None:
    """moe/ops/paged_stash.py (0.19) imports triton unguarded; its kernels are never called here."""
    name = "megatron.core.transformer.moe.ops.paged_stash"
    if name in sys.modules or importlib.util.find_spec("triton") is not None:
        return
    stub = types.ModuleType(name)
    for kernel in ("GLOBAL_BLOCK_SIZE", "paged_stash_copy_kernel", "paged_stash_pop_kernel"):
        setattr(stub, kernel, None)
    sys.modules[name] = stub


def _complete_without_transformer_engine() -> None:
    """0.16 mistakes TransformerEngine's absence in two modules; with it, there is nothing to do."""
    if importlib.util.find_spec("transformer_engine") is not None:
        return
    moe_utils: Any = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(moe_utils, "te_general_gemm"):
        # router_gating_linear tests this name, which is undefined without TransformerEngine.
        moe_utils.te_general_gemm = None
    latent: Any = importlib.import_module("megatron.core.transformer.multi_latent_attention")
    # It takes its extension module for TransformerEngine itself, and then asks whether a layer is
    # an instance of what stands there for a class.
    latent.HAVE_TE = False


def _complete_token_dispatcher() -> None:
    moe_utils: Any = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    move = moe_utils.maybe_move_tensor_to_cpu
    if getattr(move, "on_cpu", False):
        return

    def move_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        """The all-to-all dispatcher asks for numpy; a tensor of the CPU came back as it was."""
        if torch.is_tensor(tensor) and as_numpy:
            return tensor.numpy()
        return move(tensor, as_numpy, record_stream)

    move_to_cpu.on_cpu = True  # type: ignore[attr-defined]
    dispatcher: Any = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    moe_utils.maybe_move_tensor_to_cpu = dispatcher.maybe_move_tensor_to_cpu = move_to_cpu


def _one_generator() -> None:
    """Activation recompute saves and restores the CPU's generator, and then the device's.

    Here they are one, so the second save gives it again, and the second restore has nothing to do.
    """
    generators: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    generators._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    generators._set_cuda_rng_state = lambda *args, **kwargs: None


@contextlib.contextmanager
def optimizer_on_cpu() -> Iterator[None]:
    """Within it, float tensors pass the type checks of Megatron's optimizer. No-op with CUDA.

    clip_grads.py, optimizer.py and distrib_optimizer.py compare `tensor.type()` with
    `'torch.cuda.FloatTensor'` and its half-precision relatives. Enter it where an optimizer is
    built or stepped, nowhere else: it is in force for the whole process while it lasts.
    """
    if torch.cuda.is_available():
        yield
        return
    type_ = torch.Tensor.type

    def cuda_type(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            return type_(self, dtype, *args, **kwargs)
        return type_(self).replace("torch.", "torch.cuda.", 1)

    torch.Tensor.type = cuda_type  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        torch.Tensor.type = type_  # type: ignore[method-assign]


@contextlib.contextmanager
def model_on_cpu() -> Iterator[None]:
    """Within it, `Tensor.cuda()` leaves a tensor where it is. No-op with CUDA.

    Enter it where a model is built, nowhere else: it is in force for the whole process.
    """
    if torch.cuda.is_available():
        yield
        return
    cuda = torch.Tensor.cuda

    def stay(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self

    torch.Tensor.cuda = stay  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        torch.Tensor.cuda = cuda  # type: ignore[method-assign]
