"""What the layers of a micro-batch use to move keys and values, as users read it: ``cp.comm``."""

from __future__ import annotations

from hcp.attention.comm_types import CommChoice
from hcp.attention.schedules import Schedules
from hcp.exchange.calls import HandlerPart


class CommChoices(HandlerPart):
    """The comm types that layers use, and the bytes that they receive: ``cp.comm``."""

    def __init__(self, schedules: Schedules) -> None:
        self._schedules = schedules

    @property
    def choices(self) -> tuple[CommChoice, ...]:
        """The comm type that this rank's group uses for each one, mask and number of heads that
        layers have named so far or that were prepared, each with the reason."""
        return self._schedules.choices

    @property
    def default_type(self) -> str:
        """The comm type of a layer that names none."""
        return self._schedules.default

    @property
    def layer_bytes(self) -> int:
        """Bytes that this rank receives in the forward of one attention layer: of the kind of layer
        with the most so far, 0 before the first."""
        return self._schedules.layer_bytes
