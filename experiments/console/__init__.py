"""What commands read and print: words of a command line (`arguments`), tables as text, streams that take anything."""
