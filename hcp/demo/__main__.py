"""One rank under torchrun: ``torchrun -m hcp.demo ...``; else all of them."""

import os
import sys

from hcp.demo import main

code = main()
sys.stdout.flush()
sys.stderr.flush()
# The groups are destroyed, yet now and then a thread of Gloo's outlives them for a moment, and the
# C++ runtime's own clean-up would end the process with SIGABRT after all the work is done.
os._exit(code)
