"""`craton bench`: one file per benchmark."""
