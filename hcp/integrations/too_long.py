"""Samples of more tokens than all ranks together hold: left out or cut, and counted."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from hcp.step.config import Config
from hcp.step.fields import Payload, Rules, Sample

_log = logging.getLogger("hcp")


class Fit:
    """Drops or cuts the samples of a batch that are too long, on every rank alike."""

    def __init__(self, cuts: bool, longest: int, rules: Rules) -> None:
        """`longest`: tokens that a sample may have. ValueError where samples cannot be cut."""
        payloads = [name for name, rule in rules.items() if isinstance(rule, Payload)]
        if cuts and payloads:
            raise ValueError(
                f"too_long is 'cut' and fields has payloads {payloads}, expected 'drop' or "
                "'refuse': which of their rows belong to the tokens that are left is not known"
            )
        self._cuts, self._longest, self._rules = cuts, longest, rules
        self._total, self._told = 0, 0

    def __call__(
        self, lengths: Sequence[int], sources: Sequence[int], samples: Sequence[Sample], rank: int
    ) -> tuple[Sequence[int], Sequence[int], Sequence[Sample], int]:
        """Return what is left of lengths, sources and this rank's samples, and the number of
        samples that were too long. ValueError if nothing is left."""
        longest = self._longest
        count = sum(length > longest for length in lengths)
        if not count:
            return lengths, sources, samples, 0
        if not self._cuts and count == len(lengths):
            raise ValueError(
                f"all {count} samples of the batch have more than {longest} tokens, which all "
                "ranks together hold, and too_long is 'drop', expected one that is left: raise "
                "max_seqlen_per_dp_cp_rank, use more ranks, or cut"
            )
        self._tell(count, rank)
        if self._cuts:
            return [min(n, longest) for n in lengths], sources, [*map(self._cut, samples)], count
        own = [n for n, source in zip(lengths, sources, strict=True) if source == rank]
        kept = [i for i, length in enumerate(lengths) if length <= longest]
        left = [sample for n, sample in zip(own, samples, strict=True) if n <= longest]
        return [lengths[i] for i in kept], [sources[i] for i in kept], left, count

    def _cut(self, sample: Sample) -> Sample:
        rules, longest = self._rules, self._longest
        return {name: x if name in rules else x[:longest] for name, x in sample.items()}

    def _tell(self, count: int, rank: int) -> None:
        """Log the number so far on the first rank, each time that it has doubled."""
        self._total += count
        if rank > 0 or self._total < 2 * self._told:
            return
        self._told = self._total
        _log.warning(
            "hcp: %s %d samples so far, which have more than %d tokens: all ranks together do not "
            "hold them (too_long)",
            *("cut" if self._cuts else "dropped", self._total, self._longest),
        )


def fit_of(config: Config, ranks: int, alignment: int, rules: Rules | None = None) -> Fit | None:
    """Return what fits batches to the ranks, for `StepPlanner.of`; None where samples that are too
    long are refused."""
    if config.too_long == "refuse":
        return None
    return Fit(config.too_long == "cut", config.longest(ranks, alignment), rules or {})
