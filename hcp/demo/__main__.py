"""torchrun --nproc-per-node 4 -m hcp.demo"""

import sys

from hcp.demo import main

if __name__ == "__main__":
    sys.exit(main())
