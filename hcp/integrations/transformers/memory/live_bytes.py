"""The bytes of tensors that operators make, at present and at the most, without computing them.

On the device `meta` a model of any size runs in the time of its operators' calls.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts memory that operators make inside of this context, once for all views of it."""

    entered: ClassVar[list[LiveBytes]] = []

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = self.marked = 0
        self._known: set[int] = set()

    @classmethod
    def mark(cls) -> None:
        """Note in ``marked`` what is live now, the most of all calls."""
        for live in cls.entered:
            live.marked = max(live.marked, live.now)

    def __enter__(self) -> LiveBytes:
        super().__enter__()  # type: ignore[no-untyped-call]
        self.entered.append(self)
        return self

    def __exit__(self, *given: Any) -> None:
        self.entered.remove(self)
        super().__exit__(*given)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        known = {id(x.untyped_storage()) for x in tree_leaves((args, kwargs)) if _is_tensor(x)}
        result = function(*args, **(kwargs or {}))
        for tensor in filter(_is_tensor, tree_leaves(result)):
            storage = tensor.untyped_storage()
            if id(storage) not in known | self._known:
                self._add(storage)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        number, size = id(storage), storage.nbytes()
        self._known.add(number)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._gone, number, size)

    def _gone(self, number: int, size: int) -> None:
        self._known.discard(number)
        self.now -= size


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
