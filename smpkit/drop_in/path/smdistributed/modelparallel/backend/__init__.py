"""Where AWS's launcher looks for the names of errors."""
