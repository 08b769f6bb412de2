"""What ranks announce of a step before any row moves, compared in time that grows little with their
number: most of them say the same."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hcp.errors import HcpError
from hcp.exchange.differences import first_difference
from hcp.exchange.transport import Transport

_NUMBER = struct.Struct("<d")


def announcement(said: Mapping[str, Any], loss_tokens: float | None) -> bytes:
    """Make a rank's message: values that JSON can hold, and the loss tokens of its own samples,
    None if it did not count any."""
    number = math.nan if loss_tokens is None else loss_tokens
    return json.dumps(said).encode() + _NUMBER.pack(number)


class Announcements:
    """The announcements of all ranks of a domain."""

    def __init__(self, messages: Sequence[bytes], transport: Transport) -> None:
        self._transport = transport
        said = [message[: -_NUMBER.size] for message in messages]
        parsed = {text: json.loads(text) for text in dict.fromkeys(said)}
        self.by_rank: list[dict[str, Any]] = [parsed[text] for text in said]
        """What each rank says. Ranks that say the same share one dictionary."""
        self._different = list(parsed.values())
        # Whole lists at a time: there may be many thousand ranks.
        numbers = bytearray().join([message[-_NUMBER.size :] for message in messages])
        table = torch.frombuffer(numbers, dtype=torch.float64)
        counts = table[~table.isnan()].tolist()
        self.loss_tokens = float(sum(counts)) if counts else None
        """Of all ranks together. None: nobody counted them."""

    def same(self, key: str, hint: str, whole: Callable[[], Any] | None = None) -> Any:
        """Return the value that ranks announce. HcpError where two differ; None where no rank has
        one.

        ``whole``: what a rank announces a hash of. Ranks that differ gather it, to name the part
        that does.
        """
        values = [said[key] for said in self._different if said[key] is not None]
        if not values:
            return None
        if all(value == values[0] for value in values):
            return values[0]
        by_rank = {r: said[key] for r, said in enumerate(self.by_rank) if said[key] is not None}
        transport = self._transport
        if whole is not None:
            own = json.dumps({key: whole()}).encode()
            gathered = transport.all_gather_bytes(own, f"hcp.dispatch: {key}")
            by_rank = {r: json.loads(said)[key] for r, said in enumerate(gathered)}
        raise HcpError(
            f"rank {transport.rank}: {first_difference(key, by_rank)}; {hint}",
            code="ranks-differ",
        )
