"""Memory of long sequences, layer by layer: kept, recomputed, offloaded.

counted = memory.model_bytes(config, torch.bfloat16)
found = memory.choose(config, counted, prices, machine, length=1_048_576)
print(found.told())
memory.apply(model, found.choice)
"""

from hcp.integrations.transformers.memory.choice import ROWS, Choice, LayerRows
from hcp.integrations.transformers.memory.chooser import (
    Forecast,
    Machine,
    Prices,
    choose,
    longest_of,
)
from hcp.integrations.transformers.memory.layer_bytes import LayerBytes, ModelBytes, model_bytes
from hcp.integrations.transformers.memory.layers import Applied, apply, layers_of
from hcp.integrations.transformers.memory.measure import Measured, measure

__all__ = [
    "ROWS",
    "Applied",
    "Choice",
    "Forecast",
    "LayerBytes",
    "LayerRows",
    "Machine",
    "Measured",
    "ModelBytes",
    "Prices",
    "apply",
    "choose",
    "layers_of",
    "longest_of",
    "measure",
    "model_bytes",
]
