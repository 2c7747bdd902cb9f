"""Where managed jobs run: SageMaker, and a stand-in for it in memory for tests and demonstrations."""
