"""The command line, with one module per group of commands. `evernear.cli.app` combines the
modules."""
