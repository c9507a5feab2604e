"""The loop, and its data: requests, sequences, drafts, verdicts and steps.

It knows models by the `Target` protocol and methods by `Drafter`. Callers use `session`.
"""
