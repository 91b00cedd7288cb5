"""Training of drafters: prompts, answers and features of the target, the losses, the loop, the export."""
