"""The bytes of parameters, gradients and the optimizer on one device, in each phase of a step.

FSDP2 shards float32 weights and gathers those of a layer while it computes. While a layer computes,
a second gather is in memory: in the forward its own, which FSDP2 keeps until the next module is
copied out, and in the backward that of the layer below. The gradients of a layer stay in the
buffer of their reduction until the next layer is reduced. Sharded gradients are made layer by
layer, and are gone before the next step.
"""

from __future__ import annotations

from hcp.integrations.transformers.memory.layer_bytes import ModelBytes

WEIGHT, GRADIENT, MOMENTS = 4, 4, 8
"""Bytes of a parameter on its owner: in float32, both moments of Adam."""
STATE = WEIGHT + GRADIENT + MOMENTS


class WeightBytes:
    """Of one device. The gradients that a layer's own backward makes are those of LayerBytes."""

    def __init__(
        self, counted: ModelBytes, ranks: int, *, offloaded: bool, accumulates: bool, apart: bool
    ) -> None:
        """`offloaded`: weights, gradients and optimizer lie on the host. `accumulates`: a step may
        have several micro-batches. `apart`: the embedding and the head with the last norm are
        groups of FSDP2; otherwise both are the root's, and so is a head that is the embedding. One
        rank has no FSDP2, unless its weights lie on the host, or layers compute in 16 bits."""
        self.ranks, self.layers = ranks, counted.layers
        self.own = -(-counted.parameters // ranks)
        size = counted.itemsize
        self.offloaded, self.sharded = offloaded, ranks > 1 or offloaded or size < WEIGHT
        self.tied = counted.embedding_parameters == 0
        self.apart = (apart and not self.tied) or not self.sharded
        self.layer = counted.layer_parameters * size
        self.embedding = counted.embedding_parameters * size
        self.root = counted.other_parameters * size
        self.head = self.root - self.embedding
        self.head_parameters = counted.other_parameters - counted.embedding_parameters
        self.layer_parameters = counted.layer_parameters
        self.waiting = counted.parameters * size if accumulates else 0
        self.reduces = self.sharded and not accumulates

    def forward(self) -> int:
        return self._of_owner() + self._gathered(2 * self.layer, 2 * self.layer + self.root)

    def loss(self) -> int:
        """The gradient of the head's weight is made there, too."""
        gathered = self._gathered(2 * self.head, self.root + self.layer)
        return self._of_owner() + gathered + self.head

    def norm_backward(self) -> int:
        gathered = self._gathered(self.head + self.layer, self.root + self.layer)
        return self._of_owner() + gathered + self.head

    def layer_backward(self, above: int) -> int:
        """In the backward of the layer that has so many above it."""
        below = self.embedding if self.apart and above == self.layers - 1 else self.layer
        buffer = self.layer if above else self.head if self.apart else 0
        gathered = self._gathered(self.layer + below, self.root + 2 * self.layer)
        made = above * self.layer_parameters + (self.head_parameters if self.apart else 0)
        waiting = 0 if self.apart else self.head
        return self._of_owner(made) + gathered + self.reduces * buffer + waiting

    def embedding_backward(self) -> int:
        """The gradient of the whole embedding, and under FSDP2 the buffer of its reduction. A head
        that is the embedding adds its own, which waits for it, while the weight is still whole."""
        made = self.layers * self.layer_parameters
        if self.apart and not self.tied:
            made += self.head_parameters
        whole = self.embedding if self.apart and not self.tied else self.root
        copies = 1 + self.sharded + self.tied
        return self._of_owner(made) + copies * whole + self.reduces * self.layer

    def update(self) -> int:
        return 0 if self.offloaded else STATE * self.own

    def on_host(self) -> int:
        return STATE * self.own if self.offloaded else 0

    def _of_owner(self, reduced: int = 0) -> int:
        """With the sharded gradients of so many parameters. Where whole ones wait for the last
        micro-batch, each is larger than what becomes of it."""
        if self.offloaded:
            return self.waiting
        gradients = 0 if self.waiting else GRADIENT * -(-reduced // self.ranks)
        return (WEIGHT + MOMENTS) * self.own + gradients + self.waiting

    def _gathered(self, apart: int, together: int) -> int:
        return (apart if self.apart else together) * self.sharded
