"""The backend "transformer_engine" (``handler.Handler``), and rules for rebinding."""
