"""Planners and attention that hcp is compared with, re-implemented here or shipped by others."""
