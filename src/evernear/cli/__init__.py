"""The command line: a module for each group of commands. `evernear.cli.app` puts them together."""
