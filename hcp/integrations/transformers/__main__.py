"""Run the program: ``python -m hcp.integrations.transformers --ranks 4``."""

import os
import sys

from hcp.integrations.transformers.program import main

if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # as the demo does: a thread of Gloo's may outlive its group for a moment
