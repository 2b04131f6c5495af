"""Run the command line as ``python -m lucidnn``."""

from lucidnn.cli.main import main

if __name__ == "__main__":
    main()
