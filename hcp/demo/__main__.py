"""One rank under torchrun: ``torchrun -m hcp.demo ...``; else all of them."""

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
