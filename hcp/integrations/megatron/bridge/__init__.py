"""Megatron-Bridge's own `pretrain` and `finetune`: callbacks of hcp, and where they take part.

Guide: docs/guides/megatron_bridge.md.
"""
