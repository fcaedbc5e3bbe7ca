"""`craton bench`: one file a benchmark."""
