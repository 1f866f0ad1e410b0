"""`python -m experiments` is the same as `testbed`."""

import sys

from experiments.cli import main

sys.exit(main())
