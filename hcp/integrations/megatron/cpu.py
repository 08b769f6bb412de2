"""Run Megatron-Core, which names the device "cuda" in many places, on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


class _Devices(TorchFunctionMode):
    """A mode in which tensors for a GPU, or in pinned memory, are made in plain memory of the
    CPU."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        if _is_cuda(options.get("device")):
            options["device"] = _CPU
        options.pop("pin_memory", None)
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not options:  # its name
            return func(args[0]).replace("torch.", "torch.cuda.")
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        return func(*args, **options)

    def during(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that runs with this mode on. `backward` calls functions with modes off,
        and layers that are recomputed there ask for devices again."""

        def called(*args: Any, **options: Any) -> Any:
            with self:
                return function(*args, **options)

        return called


_ENGINE = "_engine_run_backward"


def _engine() -> Callable[..., Any]:
    """Return the function by which torch.autograd starts a backward."""
    run: Callable[..., Any] = getattr(torch.autograd, _ENGINE)
    return run


def _is_cuda(device: object) -> bool:
    if type(device) is int:  # its number among the GPUs
        return True
    return isinstance(device, (str, torch.device)) and str(device).startswith("cuda")


class _NoStream:
    """Stands in for a CUDA stream: on a CPU all work is done in order."""

    def wait_stream(self, other: object) -> None:
        pass

    wait_event = wait_stream

    def record_event(self) -> _NoStream:
        """Return the event: this object."""
        return self

    def synchronize(self) -> None:
        pass


def _to_numbers(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Convert a tensor to NumPy if asked to. Megatron's function leaves a tensor of the CPU as it
    is, which an exchange does not accept as sizes."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


@contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """Return a context inside which Megatron-Core builds, trains and evaluates models on the CPU.

    Inside, "cuda" means the CPU for every tensor that is made in this thread, and pinned memory is
    plain memory. The calls of `torch.cuda` by which Megatron-Core asks for a device, waits or
    counts memory do nothing. All of this is undone on exit. Gloo carries the collectives. This is
    for tests and for trying things out.
    """
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    # Release 0.16.1 uses these names whether or not Transformer Engine gave them.
    gemm = getattr(moe_utils, "te_general_gemm", None)
    no_gemm = mock.patch.object(moe_utils, "te_general_gemm", gemm, create=True)
    linear = multi_latent_attention.TELinear
    linear = linear if isinstance(linear, type) else ()
    no_linear = mock.patch.object(multi_latent_attention, "TELinear", linear)
    stream = _NoStream()
    # Each a function of its own: torch.compile has one rule for each function of torch's.
    instead: dict[str, Any] = {
        "current_device": lambda: _CPU,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
        "Stream": lambda *args, **options: _NoStream(),
        "is_current_stream_capturing": lambda: False,
    }
    draws = mock.patch.multiple(
        random,
        _get_cuda_rng_state=lambda *args, **options: torch.get_rng_state(),
        _set_cuda_rng_state=lambda state, *args, **options: torch.set_rng_state(state),
    )
    splits = mock.patch.object(token_dispatcher, "maybe_move_tensor_to_cpu", _to_numbers)
    devices = _Devices()
    backward = mock.patch.object(torch.autograd, _ENGINE, devices.during(_engine()))
    patches = (mock.patch.multiple(torch.cuda, **instead), no_gemm, no_linear, draws, splits)
    with ExitStack() as stack:
        for each in (*patches, backward, devices):
            stack.enter_context(each)
        # Draws from the CPU's generator; the other tracker forks the state of a GPU.
        random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
        yield
