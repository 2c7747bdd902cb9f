"""The command line: the only room that prints. One file per command, `_`-files for what they share."""
