"""`testbed calibrate`: profiles of the real engine (`calibrate`), and the command that fits prices to them."""
