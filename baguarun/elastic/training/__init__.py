"""Worker side: the state of training, its steps and its checkpoints."""
