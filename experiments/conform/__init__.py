"""Conformance: decision logs of real schedulers, fed to our presets and compared step by step.

    cases      reads and checks a file of cases
    systems    what each system means by each field, read off our plans
    replay     feeds one case to a scheduler and finds the first step that differs
    report     prints what came out

What a field means to another system is known here and nowhere else: the core has one vocabulary, its own.
"""

from experiments.conform.report import check_files

__all__ = ["check_files"]
