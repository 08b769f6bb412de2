"""Print digests of the planner's answers to 300 random requests: one per request, and one of all.

A change that must not alter plans prints equal digests before and after:

    PYTHONPATH=.:tests python tests/project/plan_checksums.py

The digest of a request covers the plan's checksum, makespan, bound and work. If the request is
refused, it covers the error's class and text.
"""

from __future__ import annotations

import hashlib
from random import Random

from support import planning

import hcp

SEED, COUNT = 20_260_101, 300


def answer(request: planning.Request) -> str:
    try:
        plan = hcp.plan(**request)
    except (ValueError, TypeError, OverflowError, MemoryError, hcp.HcpError) as error:
        return f"{type(error).__name__}: {error}"
    return f"{plan.checksum:016x} {plan.makespan} {plan.bound} {plan.work}"


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def main() -> None:
    r = Random(SEED)
    answers = [answer(planning.draw(r)) for _ in range(COUNT)]
    for i, text in enumerate(answers):
        print(f"{i:3} {digest(text)}")
    refused = sum(": " in text for text in answers)
    print(f"{COUNT} requests, {refused} refused:", digest("\n".join(answers)))


if __name__ == "__main__":
    main()
