"""Texts and tokens: stop strings, chat templates, vocabularies."""
