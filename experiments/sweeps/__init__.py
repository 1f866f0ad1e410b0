"""Many runs by one command: which points there are (`sweep`), which are finished already (`points`), how far it is."""
