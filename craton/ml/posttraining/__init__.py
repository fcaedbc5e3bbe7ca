"""Post-training: preference learning and RL on the training loop and the serving engine."""
