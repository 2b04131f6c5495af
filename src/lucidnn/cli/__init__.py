"""The command line: one file a command, found by `main`; everything heavy is imported when a command runs."""
