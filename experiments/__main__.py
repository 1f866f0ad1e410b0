"""`python -m experiments` is `testbed`."""

import sys

from experiments.cli import main

sys.exit(main())
