"""A job for torchtitan's own command line, with the functions that it lacks on CPUs.

    torchrun --nproc-per-node 2 titan_job.py --module titan_job --config small --training.steps 3

On GPUs it is `torchrun -m torchtitan.train --module titan_job ...`.
"""

from __future__ import annotations

from typing import Any

import titan  # type: ignore[import-not-found]  # it lies beside this script
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.train import main

import hcp


def small() -> Any:
    return titan.config_of(
        hcp.Config(max_seqlen_per_dp_cp_rank=256),
        steps=20,
        validation_rows=3,
        checkpoint=CheckpointManager.Config(enable=False),
    )


if __name__ == "__main__":
    main()
