"""Training: one loop and three recipes (draft, pre-verifier, head), and the texts to train on."""
