"""`python -m acclimate`, and with it `torchrun -m acclimate`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
