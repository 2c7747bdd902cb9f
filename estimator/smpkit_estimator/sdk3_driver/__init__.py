"""The folder that SDK v3 sends to the container; see `smpkit_estimator.sdk3`."""
