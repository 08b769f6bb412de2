"""Planners and attention that hcp is compared with, restated here or shipped by others."""
