"""Memory of long sequences, layer by layer: kept, recomputed, offloaded.

memory.apply(model, memory.Choice(layers=["recompute"] * 36, mlp_rows=16_384))
"""

from hcp.integrations.transformers.memory.choice import ROWS, Choice, LayerRows
from hcp.integrations.transformers.memory.layers import Applied, apply, layers_of

__all__ = ["ROWS", "Applied", "Choice", "LayerRows", "apply", "layers_of"]
