"""The loop, and what flows through it: requests, sequences, drafts, verdicts and steps.

It knows models by the `Target` protocol and methods by `Drafter`. `session` is for its callers."""
