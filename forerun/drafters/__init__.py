"""What runs: a drafter for each source of drafts, and the rules that end drafts."""
