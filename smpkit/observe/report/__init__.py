"""The report of a run, or of two: one HTML file that needs no network (`smpkit report`)."""
