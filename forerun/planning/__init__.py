"""Whether drafts pay, who drafts, and how much."""
