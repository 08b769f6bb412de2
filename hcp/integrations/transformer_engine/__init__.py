"""The backend "transformer_engine" (``TransformerEngineHandler``), and rules for rebinding."""
