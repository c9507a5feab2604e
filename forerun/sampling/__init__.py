"""Sampling: its parameters, distributions, seeds, penalties, grammars and log probabilities."""
