"""What "auto" chooses on a GPU, in words, and what another package would bring there."""

from __future__ import annotations

from collections.abc import Sequence

from hcp.attention.kernels import FAMILIES
from hcp.attention.kernels.present import Found, dotted
from hcp.attention.kernels.speeds import MEASURED, Capability, Speeds, gain_of


def explained(capability: Capability, found: Sequence[Found], speeds: Speeds) -> str:
    """Which kernels are there, which one computes what, and what is not there, in one line."""
    there = [each for each in found if each.lacks is None]
    shares = _shares([each.family for each in there], speeds)
    parts = [f"{each.shown} {shares[each.family]}" for each in there]
    lacking = [f"{each.family}: {each.lacks}" for each in found if each.lacks is not None]
    text = f"on compute capability {dotted(capability)}: {'; '.join(parts) or 'none is there'}"
    return text + (f". Not used: {'; '.join(lacking)}" if lacking else "")


def _shares(names: Sequence[str], speeds: Speeds) -> dict[str, str]:
    """What each family computes, as a share of the measured packs."""
    packs = {speed.lengths: speed.place for name in names for speed in speeds.get(name, ())}
    if not packs:
        return {name: _unknown(name) for name in names}
    wins = {name: [0, 0] for name in names}
    for place in packs.values():
        for way in (0, 1):
            gains = {
                name: gain_of(name, speeds.get(name, ()), place, backward=bool(way))
                for name in names
            }
            wins[max(gains, key=lambda name: gains[name])][way] += 1
    return {
        name: f"computes what is like {ahead[0]} of {len(packs)} measured packs forward and "
        f"{ahead[1]} backward"
        if name == "torch" or speeds.get(name)
        else _unknown(name)
        for name, ahead in wins.items()
    }


def _unknown(name: str) -> str:
    if name == "torch":
        return "computes every call that it takes"
    if FAMILIES[name].role == "spare":
        return "computes calls that no other takes"
    return (
        "is in no table of such a GPU, so that the first hcp.dispatch measures it; until then it "
        "computes calls that no other takes"
    )


def advice(capability: Capability, there: Sequence[str]) -> list[str]:
    """What another package would bring on a GPU, a line for each that was measured there and would
    be the fastest for some pack, and for each that was not and runs there."""
    return _measured(capability, there) + _not_measured(capability, there)


def _measured(capability: Capability, there: Sequence[str]) -> list[str]:
    tables = MEASURED.get(capability, {})
    lines = []
    for name, speeds in tables.items():
        if name in there:
            continue
        gains = [
            speed.gain(backward=backward)
            / max(
                gain_of(other, tables.get(other, ()), speed.place, backward=backward)
                for other in ("torch", *there)
            )
            for speed in speeds
            for backward in (False, True)
        ]
        ahead = [gain for gain in gains if gain > 1.0]
        if ahead:
            lines.append(
                f"install {FAMILIES[name].package}: {name} was faster in {len(ahead)} of "
                f"{len(gains)} measured cases (packs, forward and backward), up to "
                f"{max(ahead):.1f} times as fast"
            )
    return lines


def _not_measured(capability: Capability, there: Sequence[str]) -> list[str]:
    running = {
        name: family
        for name, family in FAMILIES.items()
        if family.package is not None and family.runs_on(capability)
    }
    fast = [name for name, family in running.items() if family.role == "fastest"]
    if not fast:
        return [
            f"no package of another kernel runs on this GPU; {family.package} brings torch's with "
            "soft-capping"
            for name, family in running.items()
            if family.role == "spare" and name not in there
        ]
    measured = MEASURED.get(capability, {})
    return [
        f"not measured here: {running[name].package} runs on this GPU; where it is installed, the "
        f"first hcp.dispatch measures {name} briefly, and so decides what it computes"
        for name in fast
        if name not in there and name not in measured
    ]
