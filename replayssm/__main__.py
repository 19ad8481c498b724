"""``python -m replayssm`` is the ``replayssm`` command."""

import sys

from replayssm.cli import main

if __name__ == "__main__":
    sys.exit(main())
