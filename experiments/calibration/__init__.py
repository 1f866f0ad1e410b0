"""`testbed calibrate`: profiles the real engine (`calibrate`), and fits cost models to the profile (`command`)."""
