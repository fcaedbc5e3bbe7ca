"""What verbs print: live views, tables, progress."""
