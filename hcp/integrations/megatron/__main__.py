"""Run one rank if torchrun started it (``torchrun -m hcp.integrations.megatron``), else all."""

import os
import sys

from hcp.integrations.megatron.program import main

if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # As in the demo: a thread of Gloo's may outlive its group for a moment.
    os._exit(code)
