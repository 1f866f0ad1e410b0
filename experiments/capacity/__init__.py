"""`testbed capacity`: the highest request rate at which a policy keeps its SLO, by bracketing and bisection."""

from experiments.capacity.study import Capacity, find_capacity

__all__ = ["Capacity", "find_capacity"]
