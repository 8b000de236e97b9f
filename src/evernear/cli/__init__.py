"""The command line, one module per group of commands, combined in `evernear.cli.app`."""
