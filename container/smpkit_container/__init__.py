"""The launcher: from what the platform provides to running ranks, in the training image and under `smpkit run`."""
