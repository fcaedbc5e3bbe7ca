"""The version of Craton, written once: pyproject.toml reads it from here."""

VERSION = "0.1.0"
