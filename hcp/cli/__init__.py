"""Commands of hcp, one file each."""
