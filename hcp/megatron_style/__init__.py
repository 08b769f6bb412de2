"""The names and signatures that Megatron users know, without importing Megatron.

The doors are ``core_attention.CoreAttention`` and ``packed.PackedSeqParams``.
"""
