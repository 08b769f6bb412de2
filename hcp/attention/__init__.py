"""Compute attention of a layer over the ranks of a group.

The door is ``operator.attention``, which ``ContextParallelHandler.attention`` calls. Read on in
``layer`` (forward and backward), then ``key_transfer`` (how keys arrive) and ``kernels`` (who
computes a block).
"""
