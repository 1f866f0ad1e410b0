"""The simulator: drives the core with a SimPy clock and a cost model. Knows nothing of torch."""

import testbed  # noqa: F401  decides whether the compiled modules are used, those of this package too
