"""Requests as SageMaker's own SDK v2 sends them: the arguments in `cases.py`, the requests in the JSON files.

`make.py` writes the JSON files by driving the real SDK with an S3 of moto's; `scripts/test-sdk sdk2` compares them.
"""
