"""Tools beside a training: they prove, draw, replay and choose plans and layouts, fit memory
models, write to loggers, and run ranks as threads. ``programs`` is what the commands, the demo and
the trainers' programs share.

Nothing that the library itself does needs them.
"""
