"""The OpenAI-compatible server: `forerun serve`. See docs/guide/serve.md."""
