"""Conformance: replays decision logs of real schedulers with our presets and compares every step.

    cases      reads and checks a file of cases
    systems    computes each system's fields from our plans
    replay     feeds one case to a scheduler and finds the first step that differs
    report     prints the results

Only this package knows the meaning of another system's fields; the core uses only its own terms.
"""

from experiments.conform.report import check_files

__all__ = ["check_files"]
