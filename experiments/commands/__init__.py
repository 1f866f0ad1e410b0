"""Commands of `testbed` that do little more than parse arguments and print.

Larger commands have their own packages in `experiments/`; `experiments/cli.py` lists all commands.
"""
