"""Compute attention of a layer over the ranks of a group.

The door is ``layer.attention``, which ``ContextParallelHandler.attention`` calls. Read on in
``key_transfer`` (how keys arrive), ``kernels`` (who computes a block) and ``prepared`` (what the
first call of a kind makes for all others). Compilers enter through ``operator.attention``.
"""
