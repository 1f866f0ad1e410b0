"""Many runs from one command: the points of a sweep (`sweep`), their folders and jobs (`points`), and `progress`."""
