"""Commands of python -m hcp, one file each."""
