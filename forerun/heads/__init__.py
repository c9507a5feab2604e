"""Trained layers: pre-verifiers (Pacer), and heads over the target's hidden states."""
