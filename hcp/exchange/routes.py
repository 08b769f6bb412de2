"""The routes of a micro-batch on one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hcp._validate import expect_size
from hcp.exchange.layout import Layout
from hcp.exchange.tables import Route


class Routes:
    """Makes each route when it is first asked for, and keeps it."""

    def __init__(self, layout: Layout, sources: Sequence[int] | None) -> None:
        """``sources``: the rank that loaded each sequence, for dispatch and combine."""
        self._sources = sources
        self._of = layout.plan, layout.micro_batch, layout.rank
        self._made: dict[tuple[str, int], Route] = {}
        self.has_branches = layout.plan.core.has_branches()
        """Whether a row may have several after it, on some rank of the plan."""

    def dispatch(self, *, reverse: bool = False) -> Route:
        """Rows from where they were loaded to where they are computed, or (``reverse``) back."""
        sources = self._known_sources()
        plan, micro_batch, rank = self._of
        return self._kept(
            ("dispatch", reverse),
            lambda: Route.dispatch(plan, sources, rank, micro_batch, 1, reverse=reverse),
        )

    def by_sequence(self) -> Route:
        """A row of each sequence, from the first rank of its group to where it was loaded."""
        sources = self._known_sources()
        plan, *place = self._of
        return self._kept(("by_sequence", 0), lambda: Route.by_sequence(plan, sources, *place))

    def _known_sources(self) -> Sequence[int]:
        if self._sources is None:
            raise ValueError("the handler has no sources, expected them: who loaded which sequence")
        return self._sources

    def roll(self, shift: int) -> Route:
        """Rows shifted along their documents."""
        if shift >= 0:  # the core refuses others by itself, where there are branches
            self._of[0].core.expect_trees("cp.roll_tensor")
        return self._kept(("roll", shift), lambda: Route.roll(*self._of, shift))

    def halo(self, before: int) -> Route:
        """Each span after the ``before`` rows that precede it in its document or text."""
        self._of[0].core.expect_trees("cp.scan.halo")
        before = expect_size("before", before, least=0)
        return self._kept(("halo", before), lambda: Route.halo(*self._of, before))

    def _kept(self, key: tuple[str, int], make: Callable[[], Route]) -> Route:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]
