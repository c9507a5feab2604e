"""The OpenAI-compatible server: `forerun serve`. See docs/serving.md."""
