"""Training: one loop, one kind of run, three recipes (draft, pre-verifier, head), and conversations to train on."""
