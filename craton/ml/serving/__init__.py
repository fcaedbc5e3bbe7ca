"""Serving: a paged-KV engine, and the OpenAI-compatible server in front of it."""
