"""`testbed calibrate`: profiles the real engine (`calibrate`), and fits its step times (`command`)."""
