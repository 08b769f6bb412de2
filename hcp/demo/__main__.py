"""Run one rank of the demo if torchrun started it (``torchrun -m hcp.demo``), else start all."""

import os
import sys

from hcp.demo import main

if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # The groups are destroyed, yet now and then a thread of Gloo's outlives them for a moment, and
    # the C++ runtime's own clean-up would end the process with SIGABRT after all work is done.
    os._exit(code)
