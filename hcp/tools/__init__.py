"""Tools beside a training: they prove, replay and choose plans and layouts, and fit memory models.

Nothing that runs a training step imports them.
"""
