"""A SageMaker in memory: jobs, their logs, S3, and the services around them, on one clock."""
