"""The simulator: drives the core with a SimPy clock and a cost model. Knows nothing of torch."""

import testbed  # noqa: F401 imported for what it does: it finds the compiled modules, those of this package too
