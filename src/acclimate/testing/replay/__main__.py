"""Entry point of `python -m acclimate.testing.replay`."""

import sys

from . import main

sys.exit(main())
