"""Transformer Engine: ``handler.Handler`` is the backend "transformer_engine"."""
