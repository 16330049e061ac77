"""Training: from a recipe or a Trainer, through the loop over steps, to a summary."""
