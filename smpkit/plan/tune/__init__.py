"""Choose a configuration: facts of machines, candidates, predictions, and what each layer keeps."""
