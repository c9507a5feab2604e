"""The clients that people use, each against a running server."""
