"""`testbed capacity`: the highest request rate at which a policy keeps its SLO, by bracketing and bisection."""

from experiments.capacity.found import Capacity
from experiments.capacity.study import find_capacity

__all__ = ["Capacity", "find_capacity"]
