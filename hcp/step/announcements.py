"""The announcements of ranks before any row of a step moves. Comparing them takes a time that grows
little with their number: most of them say the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from hcp.errors import HcpError
from hcp.exchange.differences import first_difference
from hcp.exchange.gather import Gathered
from hcp.exchange.transport import Transport


class Announcements:
    """The announcements of all ranks of a domain: values that JSON can hold, and the loss tokens of
    each rank's samples."""

    def __init__(self, gathered: Gathered, transport: Transport) -> None:
        self._transport, self._which = transport, gathered.which
        self._different: list[dict[str, Any]] = [json.loads(said) for said in gathered.different]
        counts = gathered.counts[~gathered.counts.isnan()].tolist()
        self.loss_tokens = float(sum(counts)) if counts else None
        """The loss tokens of all ranks together. None: nobody counted them."""

    def by_rank(self) -> list[dict[str, Any]]:
        """The announcement of each rank. Ranks that say the same share one dictionary."""
        return [self._different[i] for i in self._which.tolist()]

    def agreed(
        self, hints: Mapping[str, str], wholes: Mapping[str, Callable[[], Any]]
    ) -> dict[str, Any]:
        """Return the values that ranks announce under these keys. HcpError where two differ, with
        the key's hint; None where no rank has one.

        ``wholes``: what ranks announce hashes of, by key. Ranks that differ gather it, to name the
        part that does.
        """
        if len(self._different) == 1:
            return self._different[0]
        return {key: self._same(key, hint, wholes.get(key)) for key, hint in hints.items()}

    def _same(self, key: str, hint: str, whole: Callable[[], Any] | None) -> Any:
        values = [said[key] for said in self._different if said[key] is not None]
        if not values:
            return None
        if values.count(values[0]) == len(values):
            return values[0]
        by_rank = {r: said[key] for r, said in enumerate(self.by_rank()) if said[key] is not None}
        transport = self._transport
        if whole is not None:
            own = json.dumps({key: whole()}).encode()
            gathered = transport.all_gather_bytes(own, f"hcp.dispatch: {key}")
            by_rank = {r: json.loads(said)[key] for r, said in enumerate(gathered)}
        raise HcpError(
            f"rank {transport.rank}: {first_difference(key, by_rank)}; {hint}",
            code="ranks-differ",
        )
