"""``python -m hcp COMMAND ...``, where no script is installed."""

import sys

from hcp.cli.commands import main

if __name__ == "__main__":
    sys.exit(main())
