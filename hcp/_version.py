"""The version of hcp: pyproject.toml reads it here."""

__version__ = "0.3.0"
