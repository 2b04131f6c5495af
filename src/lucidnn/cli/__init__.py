"""The command line: info, explain, bench, verify, train. Nothing else in the package prints."""
