"""Serving: an engine with a paged KV cache, and the OpenAI-compatible server in front of it."""
