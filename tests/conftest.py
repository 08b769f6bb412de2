"""What all tests share: one thread, and random inputs that can be drawn again."""

from __future__ import annotations

import os

import torch
from hypothesis import settings

# Tests run side by side and start ranks of their own: one thread each keeps them apart, and sums
# have one order.
torch.set_num_threads(1)

# A failure prints the line that repeats it. With CI set, every run draws the same inputs.
settings.register_profile("here", deadline=None, print_blob=True)
settings.register_profile("ci", settings.get_profile("here"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")
