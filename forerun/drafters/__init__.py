"""Drafters: where proposals come from."""
