"""What packages of trainers take from a later Python than that of the tests."""

import typing

import typing_extensions


def complete_typing() -> None:
    """Give `typing` of Python 3.11 the `override` of 3.12."""
    if not hasattr(typing, "override"):
        vars(typing)["override"] = typing_extensions.override
