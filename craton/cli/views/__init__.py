"""Terminal output of the commands: live views, tables, progress."""
