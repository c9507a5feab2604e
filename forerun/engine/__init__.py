"""The loop, and what flows through it: sequences, drafts, verdicts and steps."""
