import boto3
from moto import mock_aws

smp_options = {"enabled": True, "parameters": {"pipeline_parallel_degree": 4, "microbatches": 8, "ddp": True}}
mpi_options = {"enabled": True, "processes_per_host": 8}

mock_aws().start()
boto3.setup_default_session(region_name="us-east-1")
boto3.client("s3").create_bucket(Bucket="sagemaker-us-east-1-123456789012")
boto3.client("iam").create_role(RoleName="SageMakerRole", AssumeRolePolicyDocument="{}")
