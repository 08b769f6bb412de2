"""Code that knows trainers. Each trainer's package is imported only when it is used."""

from importlib.util import find_spec

if find_spec("torch") is None:
    raise ImportError(
        f"{__name__} needs torch, which is not installed: python -m pip install torch",
        name=__name__,
    )
