"""What the words after `testbed` do, where it is little more than reading a command line and printing.

Commands with work of their own have a package beside this one; `experiments/cli.py` lists them all.
"""
