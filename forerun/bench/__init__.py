"""Measuring methods beside each other: same models, same prompts, one process, in turns."""
