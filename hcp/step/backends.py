"""Backends: whose code computes attention. PyTorch, another library, or a third party.

A library's kernels are a row of ``hcp.attention.kernels.FAMILIES``, and the handler is hcp's. A
backend that exchanges keys itself has a handler class of its own.

    cls = hcp.get_cp_handler_cls(backend="auto", cp_comm_type="all_gather")
    for cp, local in hcp.dispatch(plan, samples, sources, groups, handler_cls=cls):
        ...
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from hcp._validate import expect_items
from hcp._words import CommType
from hcp.attention.comm_types import COMM_TYPES
from hcp.attention.kernels import FAMILIES, KernelFamily, version_of
from hcp.errors import HcpError
from hcp.step.handler import ContextParallelHandler

HandlerClass = type[ContextParallelHandler]

INSTALL_TE = "python -m pip install --no-build-isolation 'transformer-engine[pytorch]>=2,<3'"


class HandlerBackend(NamedTuple):
    """A backend with a handler class of its own, which also exchanges keys itself."""

    load: Callable[[], HandlerClass]
    """Imports the class. Raises ImportError if its library is missing."""
    package: str | None = None
    """The library's name for pip. None: it needs none besides torch."""
    capability: tuple[int, int] = 0, 0
    """The least compute capability of a GPU that it runs on."""
    install: str = ""
    """How to install the package."""

    @property
    def version(self) -> str | None:
        """The version of the package, which is not imported. None: it is not installed."""
        return version_of(self.package)


def _transformer_engine() -> HandlerClass:
    handler: HandlerClass = importlib.import_module(
        "hcp.integrations.transformer_engine.transformer_engine_handler"
    ).TransformerEngineHandler
    return handler


BACKENDS: dict[str, KernelFamily | HandlerBackend] = {
    **FAMILIES,
    "transformer_engine": HandlerBackend(
        _transformer_engine, "transformer-engine", install=INSTALL_TE
    ),
}


def register_backend(name: str, load: Callable[[], HandlerClass]) -> None:
    """Make ``get_cp_handler_cls(backend=name)`` return the class that ``load()`` returns.

    The class derives from :class:`hcp.ContextParallelHandler` and has an ``attention`` of its own,
    with the arguments and results described there: exact forward and backward, for the rows and
    groups that ``self.layout`` names. It refuses arguments that it does not support with
    ValueError. It inherits everything else (dispatch, combine, rolling, rotary embedding, the
    loss).

    Args:
        name: of the backend.
        load: called when somebody asks for the backend, so its library need not be there before. An
            ImportError in it becomes the HcpError of a backend that cannot be imported.

    Raises:
        ValueError: a name that is taken, or has a "." or ":".
    """
    if name in BACKENDS:
        raise ValueError(f"backend {name!r} is there already, expected a new name")
    if set(name) & set(".:"):
        raise ValueError(
            f"backend {name!r} has a '.' or ':', expected neither: it is part of a class's name"
        )
    BACKENDS[name] = HandlerBackend(load)


def get_cp_handler_cls(
    backend: str = "auto", cp_comm_type: CommType | Sequence[CommType] = "p2p"
) -> HandlerClass:
    """The class of handlers that :func:`hcp.dispatch` makes (``handler_cls=``).

    ``backend`` is one of

    - "auto": for every call the first of the installed kernels that takes it, in an order that was
      measured; on CPUs what "torch" is. What is there is logged once.
    - "torch": PyTorch's kernels: FlashAttention-2 on CUDA.
    - "cudnn": cuDNN's packed attention by nvidia-cudnn-frontend, on Hopper and Blackwell.
    - "flash_attn": the package of this name, on CUDA.
    - "flash_attn_3": the package flash-attn-3, on Hopper.
    - "flash_attn_4": the package flash-attn-4, on Hopper or later.
    - "transformer_engine": its DotProductAttention, which exchanges keys itself.
    - a name given to :func:`hcp.register_backend`.

    Args:
        backend: whose kernels compute attention.
        cp_comm_type: how keys and values travel unless dispatch is told otherwise: one value or one
            per layer, as in Megatron. The first is the default.

    Returns:
        A class. The same arguments give the same one, also in a process that unpickles it.

    Raises:
        ValueError: an unknown backend or type.
        HcpError: the backend's library cannot be imported.
    """
    if not isinstance(cp_comm_type, str):
        expect_items("cp_comm_type", cp_comm_type, "comm types, or one")
    types = (cp_comm_type,) if isinstance(cp_comm_type, str) else tuple(cp_comm_type)
    for name in types:
        if name not in COMM_TYPES:
            raise ValueError(f"cp_comm_type is {name!r}, expected one of {COMM_TYPES}")
    if not types:
        raise ValueError("cp_comm_type is empty, expected one value or one per layer")
    _expect_known(backend)
    return _made(backend, tuple(dict.fromkeys(types)))


def _expect_known(backend: str) -> None:
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}, expected one of {sorted(BACKENDS)}")


def require_backend(backend: str) -> None:
    """Raise HcpError unless a package that computes the backend's attention is installed here.

    Packages are looked up and not imported. Call it where ranks will run with the packages that
    this process sees: in a rank, or in a program that starts ranks on this machine. A launcher on
    another machine, such as a login node, has other packages than its ranks.
    """
    _expect_known(backend)
    missing = _missing(backend)
    if missing is not None:
        raise missing


def is_rank() -> bool:
    """Whether this process is a rank: a launcher numbered it, as torchrun does, or
    torch.distributed is initialised."""
    return "RANK" in os.environ or (dist.is_available() and dist.is_initialized())


def _missing(backend: str) -> HcpError | None:
    """The error of a backend whose package is not installed. None: it is, or there is none."""
    row = BACKENDS[backend]
    if row.package is None or row.version is not None:
        return None
    return HcpError(
        f"the backend {backend!r} needs the package {row.package}, which is not installed: "
        f"{row.install}, or use the backend 'auto'",
        code="backend-missing",
    )


@functools.cache
def _made(backend: str, comm_types: tuple[str, ...]) -> HandlerClass:
    base, family = _loaded(backend)
    if (base.kernel_family, base.comm_types) == (family, comm_types):
        return base
    name = f"{backend}:{','.join(comm_types)}"
    return type(name, (base,), {"kernel_family": family, "comm_types": comm_types})


def _loaded(backend: str) -> tuple[HandlerClass, str]:
    """The class to derive from, and the family of its kernels."""
    row = BACKENDS[backend]
    try:
        if isinstance(row, HandlerBackend):
            base = row.load()
            return base, base.kernel_family
        row.load()
        return ContextParallelHandler, backend
    except ImportError as error:
        missing = _missing(backend) if isinstance(error, ModuleNotFoundError) else None
        raise missing or HcpError(
            f"the backend {backend!r} cannot be imported ({error}): install what its library "
            "needs, or use the backend 'auto'",
            code="backend-missing",
        ) from error


def __getattr__(name: str) -> HandlerClass:
    """Give pickle the classes that ``_made`` makes: it looks for them here, by their names."""
    backend, made, comm_types = name.partition(":")
    if not made:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    types: Any = comm_types.split(",")
    return get_cp_handler_cls(backend, types)
